"""The Dockerfile: its commands run in a fresh Debian, where Ray then starts and takes a job as KubeRay gives it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("debootstrap"), reason="needs root and debootstrap"),
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="downloads the wheels for the Python of the image, which is 3.11"),
]

# Mounts, processes and network are the command's own, and end with it.
_ALONE = """
set -e
mount -t tmpfs tmpfs {root}/dev/shm
ip link set lo up
exec chroot --userspec=ray {root} /usr/bin/env -i HOME=/home/ray {variables} bash -c {command}
"""
# The health checks are those of KubeRay 1.5 to 1.7 (ray-operator/controllers/ray/utils/constant.go).
_JOB = """
set -e
cd /tmp
python -c 'import torch; assert torch.version.cuda is None, torch.version.cuda'
ray start --head --num-cpus=2 --dashboard-host=0.0.0.0 --dashboard-agent-listen-port=52365
for path in 52365/api/local_raylet_healthz 8265/api/gcs_healthz; do
    timeout 240 bash -c "until wget --tries 1 -T 10 -q -O- http://localhost:$path | grep success; do sleep 1; done"
done
ray job submit --address http://127.0.0.1:8265 --entrypoint-num-cpus 1 -- \
    python /home/ray/tree-attention/workflows/preprocess.py --sample --out /tmp/data workers=0
test -s /tmp/data/provenance.json
"""


def run(*command: str, **options) -> None:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    assert result.returncode == 0, f"{command[-1]}\n{result.stdout[-6000:]}"


def build(dockerfile: str, root: Path, repository: Path, given: dict[str, str]) -> dict[str, str]:
    """Carry out the lines of a Dockerfile in a folder, after FROM; return the variables of its environment."""
    variables, folder = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, "/"
    for line in re.findall(r"^[A-Z].*", dockerfile, re.MULTILINE):
        name, _, rest = line.partition(" ")
        if name == "RUN":
            setting = [f"{key}={value}" for key, value in {**variables, **given}.items()]
            run("chroot", root, "/usr/bin/env", "-i", *setting, "sh", "-c", f"cd {folder} && {rest}")
        elif name in ("ENV", "ARG"):
            key, _, value = rest.partition("=")
            variables[key] = value.replace("$PATH", variables["PATH"])
        elif name == "WORKDIR":
            folder = rest
            (root / folder[1:]).mkdir(parents=True)
        elif name == "COPY":
            *sources, target = rest.split()
            for source in sources:
                place = root / folder[1:] / target
                if (repository / source).is_dir():
                    shutil.copytree(repository / source, place, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(repository / source, place)
        else:
            assert name in ("FROM", "USER"), line
    return variables


def test_the_image_is_built_and_takes_a_job(repository, tmp_path):
    dockerfile = (repository / "Dockerfile").read_text()
    [suite] = re.findall(r"^FROM debian:(\w+)-slim$", dockerfile, re.MULTILINE)
    root = tmp_path / "root"
    run("debootstrap", "--variant=minbase", suite, str(root))
    shutil.copy("/etc/resolv.conf", root / "etc")
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost\n")  # Kubernetes writes this file
    # This machine fetches the wheels: its pip has its settings, and not every machine reaches the index of PyTorch.
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(root / "wheels"))
    run(*pip, "--constraint", str(repository / "constraints.txt"), f"{repository}[all]", "setuptools>=77")
    try:
        variables = build(dockerfile, root, repository, {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels", "PIP_NO_COMPILE": "1"})
        setting = " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
        script = _ALONE.format(root=root, variables=setting, command=shlex.quote(_JOB))
        run("unshare", "--mount", "--net", "--pid", "--fork", f"--mount-proc={root}/proc", "sh", "-c", script)
    finally:
        shutil.rmtree(root)  # 4 GB
