"""--dataset-name and --dataset-path: what is sent, by the names of other bench clients."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from quadriga.config.flags import flag_name
from quadriga.errors import ConfigError

DATASETS = {
    "random": "random_input_len",
    "shared-prefix": "prefix_groups",
    "sharegpt": "dataset_path",
    "trace": "dataset_path",
}
"""Each with a flag without which it is nothing."""
NOT_IN_SHAREGPT = (
    "trace",
    "random_input_len",
    "prompt",
    "prompt_repeats",
    "prompt_form",
    "prefix_groups",
    "turns",
)


def add_dataset(group: Any) -> None:
    """Add them to a parser."""
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        help="random (--random-input-len), shared-prefix (--prefix-groups), sharegpt or trace"
        " (--dataset-path); without it, a text",
    )
    group.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help="sharegpt: a JSON list of objects with `conversations`, of which the first two turns"
        " are prompt and length of the answer; trace: as for --trace",
    )


def take_dataset(arguments: Namespace, given: set[str]) -> None:
    """Write into `arguments` and `given` what --dataset-name means by other flags, and whether
    answers are as long as the file's. ConfigError for what does not go together."""
    name = arguments.dataset_name
    arguments.file_lengths = name == "sharegpt" and "max_new_tokens" not in given
    if name is None:
        return
    if DATASETS[name] not in given:
        needed = flag_name(DATASETS[name])
        raise ConfigError(f"--dataset-name {name} is nothing without {needed}: add it")
    if "dataset_path" in given and DATASETS[name] != "dataset_path":
        raise ConfigError(f"--dataset-path has no effect with --dataset-name {name}: leave it out")
    if name == "trace":
        arguments.trace = arguments.dataset_path
        given.add("trace")
    if name == "sharegpt" and (idle := [flag_name(n) for n in NOT_IN_SHAREGPT if n in given]):
        raise ConfigError(
            f"{', '.join(idle)} would have no effect: --dataset-name sharegpt sends what the file"
            " has"
        )
