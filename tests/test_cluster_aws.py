"""cluster.yaml on AWS: Ray's schema, bootstrap and node provider against moto, with the values that docs/cluster.md makes."""

import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import yaml
from moto_store import s3_server

pytestmark = pytest.mark.slow

boto3 = pytest.importorskip("boto3", reason="boto3 is not installed; it comes with the extra 'test'")
moto = pytest.importorskip("moto", reason="moto is not installed; it comes with the extra 'test'")
pytest.importorskip("ray.autoscaler._private.aws.config", reason="this Ray has no bootstrap of AWS to call")

CANONICAL = "099720109477"  # images of Ubuntu
REGION = "eu-central-1"  # not the region of the file, so that a place that keeps it shows


def write_values(text: str, values: dict[str, str]) -> dict:
    """Return the launcher's file with values in place of what it marks with CHANGE."""
    for name, value in values.items():
        assert name in text, name
        text = text.replace(name, value)
    return yaml.safe_load(text)


@pytest.fixture(scope="module")
def cloud(tmp_path_factory):
    """Yield the values of the lines with CHANGE, in a made-up AWS where an EFS has one mount target."""
    from ray.autoscaler._private.aws import utils

    with pytest.MonkeyPatch.context() as patch, moto.mock_aws():
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))  # the launcher writes its key there
        utils.resource_cache.cache_clear()
        ec2, efs, iam = (boto3.client(name, region_name=REGION) for name in ("ec2", "efs", "iam"))
        # What the launcher makes at the first `ray up`, after which it waits for half a minute.
        iam.create_instance_profile(InstanceProfileName="ray-autoscaler-v1")
        iam.create_role(RoleName="ray-autoscaler-v1", AssumeRolePolicyDocument="{}")
        iam.add_role_to_instance_profile(InstanceProfileName="ray-autoscaler-v1", RoleName="ray-autoscaler-v1")
        subnet, *others = ec2.describe_subnets()["Subnets"]
        assert {one["AvailabilityZone"] for one in others} - {subnet["AvailabilityZone"]}
        group = ec2.create_security_group(GroupName="tree-attention", Description="all", VpcId=subnet["VpcId"])["GroupId"]
        files = efs.create_file_system()["FileSystemId"]
        target = efs.create_mount_target(FileSystemId=files, SubnetId=subnet["SubnetId"], SecurityGroups=[group])
        ubuntu, gpu = (image["ImageId"] for image in ec2.describe_images(Owners=[CANONICAL])["Images"][:2])
        yield {
            "us-west-2": REGION,
            "address-CHANGE": target["IpAddress"],
            "subnet-CHANGE": subnet["SubnetId"],
            "sg-CHANGE": group,
            "ami-CHANGE": ubuntu,
            "gpu-CHANGE": gpu,
        }
    utils.resource_cache.cache_clear()


@pytest.fixture(scope="module")
def nodes(cloud, repository) -> dict[str, tuple[dict, list[str]]]:
    return launch(write_values((repository / "cluster.yaml").read_text(), cloud))


def launch(cluster: dict) -> dict[str, tuple[dict, list[str]]]:
    """Start one node of each group as the launcher does; return what EC2 says of it and the commands that set it up."""
    from ray.autoscaler._private import util
    from ray.autoscaler._private.autoscaler import StandardAutoscaler
    from ray.autoscaler._private.aws.config import bootstrap_aws
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

    config = util.prepare_config(cluster)
    util.validate_config(config)
    config = bootstrap_aws(config)
    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    autoscaler = SimpleNamespace(provider=provider, config=config, available_node_types=config["available_node_types"])
    nodes = {}
    for name, group in config["available_node_types"].items():
        first = config["head_node"] if name == config["head_node_type"] else {}  # the role that `ray up` makes
        [(node, _)] = provider.create_node({**first, **group["node_config"]}, {"ray-user-node-type": name}, 1).items()
        provider.non_terminated_nodes({})  # reads the tags of the nodes
        commands = config["head_setup_commands"]
        if name != config["head_node_type"]:
            commands = StandardAutoscaler._get_node_type_specific_fields(autoscaler, node, "worker_setup_commands")
        [reservation] = boto3.client("ec2", region_name=REGION).describe_instances(InstanceIds=[node])["Reservations"]
        nodes[name] = reservation["Instances"][0], commands
    return nodes


@pytest.fixture
def text(repository) -> str:
    return (repository / "cluster.yaml").read_text()


def test_every_node_starts_beside_the_mount_target_and_may_write_to_the_mount(nodes, cloud):
    check(nodes, cloud)


def check(nodes: dict[str, tuple[dict, list[str]]], cloud: dict[str, str]) -> None:
    """Nodes lie in subnet and group of the mount target; the commands mount its address and give the folder to the user."""
    assert set(nodes) == {"head", "parse", "train"}
    for name, (node, commands) in nodes.items():
        assert node["SubnetId"] == cloud["subnet-CHANGE"], name
        [card] = node["NetworkInterfaces"]
        assert [group["GroupId"] for group in card["Groups"]] == [cloud["sg-CHANGE"]], name
        assert node["ImageId"] == cloud["gpu-CHANGE" if name == "train" else "ami-CHANGE"], name
        [mount] = [command for command in commands if "mount -t" in command]
        assert f" {cloud['address-CHANGE']}:/ /shared" in mount and mount.endswith("&& sudo chown ubuntu:ubuntu /shared"), name
        assert any("nfs-common" in command for command in commands[: commands.index(mount)]), name


def test_cpu_nodes_install_pytorch_without_cuda_and_all_nodes_the_pins(nodes):
    cpu, gpu, (*head, boto) = (
        [command for command in nodes[name][1] if "pip install" in command] for name in ("parse", "train", "head")
    )
    assert (
        cpu == head == ["PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu " + command for command in gpu]
        and len(gpu) == 1
    )
    assert all(
        "~/venv/bin/pip install --quiet --constraint ~/tree-attention/constraints.txt" in command for command in (*gpu, boto)
    )
    # Whoever may submit jobs has the token; without it, a node could not join.
    assert all(any("RAY_AUTH_MODE=token" in command for command in commands) for _, commands in nodes.values())


def test_the_region_stands_in_one_place(text):
    assert len(re.findall(r"\w\w-\w+-\d\b", text)) == 1


@pytest.mark.parametrize(
    "mounted, can_mount, expected", [(False, True, "mount chown"), (True, True, "chown"), (False, False, "mount")]
)
def test_only_a_mounted_folder_is_given_to_the_user(text, tmp_path, mounted, can_mount, expected):
    """The command runs in bash, with programs in place of those that need rights."""
    [command] = [command for command in yaml.safe_load(text)["setup_commands"] if "mount -t" in command]
    programs = {
        "mkdir": "",
        "mountpoint": f"exit {int(not mounted)}",
        "mount": f"exit {int(not can_mount)}",
        "chown": "",
        "sudo": 'exec "$@"',
    }
    for name, body in programs.items():
        note = f"echo {name} >> {tmp_path}/ran\n" if name in ("mount", "chown") else ""
        (tmp_path / name).write_text(f"#!/bin/bash\n{note}{body}\n")
        (tmp_path / name).chmod(0o755)
    result = subprocess.run(["/bin/bash", "-c", command], env={"PATH": f"{tmp_path}:/bin"})
    assert (tmp_path / "ran").read_text().split() == expected.split() and (result.returncode == 0) == can_mount


@pytest.mark.cluster
@pytest.mark.timeout(1800)
def test_the_commands_of_the_page_make_what_the_launcher_needs(repository, tmp_path, monkeypatch):
    """The AWS CLI runs them against a server of moto, which has neither placement groups nor SSM's list of images."""
    from ray.autoscaler._private.aws import utils

    page = (repository / "docs" / "cluster.md").read_text()
    section = page[page.index("## AWS with the cluster launcher") : page.index("## Machines you have")]
    network, images, values, _, roles = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    network = (
        network.replace("us-west-2", REGION).replace("YOUR_ADDRESS", "192.0.2.1").replace("aws ec2 create-placement-group", ":")
    )
    names = [line.partition("=")[0] for line in images.splitlines()]
    images = "".join(
        f"{name}=$(aws ec2 describe-images --query 'Images[{i}].ImageId' --output text)\n" for i, name in enumerate(names)
    )
    if not shutil.which("aws"):
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "cli"], check=True)
        subprocess.run([tmp_path / "cli/bin/pip", "install", "--quiet", "awscli"], check=True)
        monkeypatch.setenv("PATH", f"{tmp_path}/cli/bin:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MOTO_IAM_LOAD_MANAGED_POLICIES", "true")
    with s3_server(tmp_path):
        (tmp_path / "cluster.yaml").write_text((repository / "cluster.yaml").read_text())
        shown = "printf '%s\\n' $ADDRESS $SUBNET $GROUP $UBUNTU $GPU > made"
        subprocess.run(["bash", "-ec", network + images + values + shown], cwd=tmp_path, check=True)
        text = (tmp_path / "cluster.yaml").read_text()
        assert not re.findall(r"\w-CHANGE", text) and REGION in text
        marks = ("address-CHANGE", "subnet-CHANGE", "sg-CHANGE", "ami-CHANGE", "gpu-CHANGE")
        utils.resource_cache.cache_clear()
        check(launch(yaml.safe_load(text)), dict(zip(marks, (tmp_path / "made").read_text().split(), strict=True)))
        subprocess.run(["bash", "-ec", roles], env={**os.environ, "AWS_DEFAULT_REGION": REGION}, check=True)
        line = "IamInstanceProfile: {Name: tree-attention-nodes}\n"
        text = text.replace(f"# {line}", line).replace("      InstanceType: p4d", f"      {line}      InstanceType: p4d")
        found = {
            name: node["IamInstanceProfile"]["Arn"].rpartition("/")[2] for name, (node, _) in launch(yaml.safe_load(text)).items()
        }
        assert found == {"head": "ray-autoscaler-v1", "parse": "tree-attention-nodes", "train": "tree-attention-nodes"}
    utils.resource_cache.cache_clear()
