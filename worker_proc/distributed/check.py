"""Check that a model can be split over the ranks, before they are started."""

from quadriga.config.replica_args import ONLY_REPLICA, ReplicaPlace
from quadriga.config.worker_args import WorkerArgs
from quadriga.model_files.model_impl.choice import ModelImpl, choose_model_impl
from quadriga.model_files.resolve import ModelFiles
from worker_proc.models.registry import build_model
from worker_proc.system.devices import choose_device
from worker_proc.transformers_impl.loading import read_config
from worker_proc.transformers_impl.parallel import check_plan


def check_ranks(args: WorkerArgs, files: ModelFiles, replica: ReplicaPlace = ONLY_REPLICA) -> None:
    """Raise ConfigError if there are too few devices here, or the model cannot be split."""
    choose_device(args.device, replica.ranks_per_machine(args.tp) - 1)
    if choose_model_impl(files) is ModelImpl.TRANSFORMERS:
        check_plan(read_config(files), args.tp)
    else:
        build_model(files.config, tp_size=args.tp)
