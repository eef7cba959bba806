"""Make neural networks 10-60 times smaller by clustering their weights while they train."""

from . import temperature
from .allocate import divergence
from .batchnorm import recalibrate_
from .capture import capture
from .clustered import Clustered
from .compress import cluster_weight, compress_, snap_
from .distill import distill, teacher
from .file import FileError, load, save, size
from .functional import Clustering, assign, cluster, init_centroids
from .layer import DKM
from .monitor import monitor
from .plan import Plan, PlanError, plan
from .search import search_tau

__version__ = "0.1.0"

__all__ = [
    "DKM",
    "Clustered",
    "Clustering",
    "FileError",
    "Plan",
    "PlanError",
    "assign",
    "capture",
    "cluster",
    "cluster_weight",
    "compress_",
    "distill",
    "divergence",
    "init_centroids",
    "load",
    "monitor",
    "plan",
    "recalibrate_",
    "save",
    "search_tau",
    "size",
    "snap_",
    "teacher",
    "temperature",
]
