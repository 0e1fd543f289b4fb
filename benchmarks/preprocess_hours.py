"""Hours and dollars of preprocessing on clusters, computed from measured figures: the table of docs/preprocessing.md.

    python benchmarks/preprocess_hours.py

Nothing runs on a cluster here. `MEASURED` has figures of one core (docs/results/preprocess.md); `ASSUMED` has the others.
A stage takes as long as its tasks on all cores, or as long as the driver, whichever is longer.
"""

MEASURED = {
    "parse_s": 1 / 195,  # a WMT line of 23 words with the shipped models
    "encode_s": 1 / 33_700,
    "text_task_s": 18.2e-6,
    "text_driver_s": 2.0e-6,
    "vocabulary_task_s": 5.9e-6,  # a line of the sample
    "job_driver_s": 6.6e-3,  # the driver's time for an actor's job without work
    "task_driver_s": 10.4e-3,  # the driver's time for a task without work
    "install_s": 115,  # the packages of a node without GPUs
    "start_s": 15,  # Ray, actors and models
}
ASSUMED = {
    "efficiency": 0.85,
    "vocabulary_s": 120,
    "sample": 4_000_000,
    "boot_s": 120,
    "gpu_boot_s": 300,
    "gpu_install_s": 300,
    "dollars_a_core_hour": 0.05,
    "dollars_a_gpu_hour": 3,
}
PAIRS_A_JOB = 50_000
CLUSTERS = (("16 nodes of 16 cores", 256, 0), ("one node of 96 cores, 8 GPUs", 96, 8), ("8 nodes of 96 cores, 64 GPUs", 768, 64))
PAIRS = (4_500_000, 100_000_000, 1_000_000_000)


def stages(pairs: int, cores: int, gpus: int) -> dict[str, float]:
    """Return the seconds of each stage for `pairs` pairs on `cores` cores, with nodes that boot first."""
    speed = cores * ASSUMED["efficiency"]
    nodes = ASSUMED["gpu_boot_s"] + ASSUMED["gpu_install_s"] if gpus else ASSUMED["boot_s"] + MEASURED["install_s"]
    driver, tasks = (pairs / PAIRS_A_JOB * MEASURED[name] for name in ("job_driver_s", "task_driver_s"))
    return {
        "nodes": nodes,
        "start": MEASURED["start_s"],
        "text": max(pairs * MEASURED["text_task_s"] / speed, pairs * MEASURED["text_driver_s"] + 3 * tasks),
        "parsing": max(pairs * MEASURED["parse_s"] / speed, driver),
        "vocabulary": min(pairs, ASSUMED["sample"]) * MEASURED["vocabulary_task_s"] / speed + ASSUMED["vocabulary_s"],
        "encoding": max(pairs * MEASURED["encode_s"] / speed, driver),
    }


def main() -> None:
    names = list(stages(1, 1, 0))
    print("| cluster | pairs | hours | dollars | " + " | ".join(f"{name}, s" for name in names) + " |")
    print("|---" * (4 + len(names)) + "|")
    for name, cores, gpus in CLUSTERS:
        price = gpus * ASSUMED["dollars_a_gpu_hour"] if gpus else cores * ASSUMED["dollars_a_core_hour"]
        for pairs in PAIRS:
            seconds = stages(pairs, cores, gpus)
            hours = sum(seconds.values()) / 3600
            cells = [name, f"{pairs / 1e6:,g} million", f"{hours:.2g}", f"{hours * price:,.0f}"]
            print("| " + " | ".join(cells + [f"{one:,.0f}" for one in seconds.values()]) + " |")


if __name__ == "__main__":
    main()
