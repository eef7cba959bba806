"""Compressed models in other formats: a file for each format ("target"), and a registry of their names.

    safetensors   dense weights, for whatever reads these
    onnx          codes and centroids with standard operators, for onnxruntime
    coreml        a package with palettes, for Core ML
    aqlm          a folder for transformers, with AQLM's layers
    transformers  a folder for transformers and dkm, with codes and centroids

`export.py` is the same for all of them: it describes the tensors, makes the plain model, lets the target write and
check, and moves the result to its place only if it computes what the model computes.  Importing this package registers
the targets; what a target needs is imported when it writes.
"""

from . import dense, onnx, coreml, aqlm, transformers_folder  # isort: skip  # in the order of the table above
from .export import export
from .target import TARGETS, Checked, Job, Report, Row, Target, named, option_types, register

__all__ = [
    "TARGETS",
    "Checked",
    "Job",
    "Report",
    "Row",
    "Target",
    "aqlm",
    "coreml",
    "dense",
    "export",
    "named",
    "onnx",
    "option_types",
    "register",
    "transformers_folder",
]
