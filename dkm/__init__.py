"""Make neural networks 10-60 times smaller by clustering their weights while they train."""

from .foundation.interrupts import quiet_imports

with quiet_imports():
    from .clustering import temperature
    from .clustering.assign import assign
    from .clustering.cluster import Clustering, cluster
    from .clustering.initialize import init_centroids
    from .compress import cluster_weight, compress_, snap_
    from .exporters import export
    from .formats.dkm_file import save, size
    from .foundation.errors import DKMError, ExportError, FileError, MethodError, NeedError, PlanError
    from .modelling.clustered import Clustered
    from .modelling.layer import DKM
    from .modelling.methods import register as register_method
    from .planning import plan
    from .plans.rows import Plan
    from .runtime.loading import load
    from .training.batchnorm import recalibrate_
    from .training.capture import capture
    from .training.distill import distill, divergence, teacher
    from .training.monitor import monitor
    from .training.needs import calibrate_, method_loss
    from .training.reconstruct import reconstruct_
    from .training.search import search_tau

__version__ = "0.1.0"

__all__ = [
    "DKM",
    "Clustered",
    "Clustering",
    "DKMError",
    "ExportError",
    "FileError",
    "MethodError",
    "NeedError",
    "Plan",
    "PlanError",
    "assign",
    "calibrate_",
    "capture",
    "cluster",
    "cluster_weight",
    "compress_",
    "distill",
    "divergence",
    "export",
    "init_centroids",
    "load",
    "method_loss",
    "monitor",
    "plan",
    "recalibrate_",
    "reconstruct_",
    "register_method",
    "save",
    "search_tau",
    "size",
    "snap_",
    "teacher",
    "temperature",
]
