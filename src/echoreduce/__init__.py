"""EchoReduce: tensor parallelism whose all-reduce sends 4 bits instead of 16."""

from echoreduce.config import NO_FEEDBACK, PRESETS, EchoConfig, FeedbackConfig, QuantConfig, preset
from echoreduce.config_file import load_config, save_config
from echoreduce.sites import early_half, edges, uniform

__version__ = "0.1.0"

__all__ = [
    "NO_FEEDBACK",
    "PRESETS",
    "EchoConfig",
    "FeedbackConfig",
    "QuantConfig",
    "__version__",
    "early_half",
    "edges",
    "load_config",
    "preset",
    "save_config",
    "uniform",
]
