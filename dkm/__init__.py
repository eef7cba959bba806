"""Make neural networks 10-60 times smaller by clustering their weights while they train."""

from .batchnorm import recalibrate_
from .clustered import Clustered
from .compress import cluster_weight, compress_, snap_
from .file import FileError, load, save, size
from .functional import Clustering, assign, cluster, init_centroids
from .layer import DKM
from .plan import Plan, PlanError, plan

__version__ = "0.1.0"

__all__ = [
    "DKM",
    "Clustered",
    "Clustering",
    "FileError",
    "Plan",
    "PlanError",
    "assign",
    "cluster",
    "cluster_weight",
    "compress_",
    "init_centroids",
    "load",
    "plan",
    "recalibrate_",
    "save",
    "size",
    "snap_",
]
