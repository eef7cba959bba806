"""What a folder of transformers has for texts: the tokenizer, and the configuration of the model."""

from typing import Any

from .. import models
from ..errors import Problem


def tokenizer_and_config(name: str) -> tuple[Any, Any]:
    """Those in the folder `name`; Problem where it is not a folder of transformers, or has no tokenizer."""
    if not models.is_transformer(name):
        raise Problem(f"texts need a transformers model: {name} is not a folder with its files")
    try:
        import transformers
    except ImportError:
        raise Problem("texts need transformers: pip install transformers") from None
    transformers.logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, local_files_only=True)
        config = transformers.AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError) as error:
        line = str(error).strip().splitlines()[0]
        raise Problem(f"cannot read the tokenizer in {name}: {line}") from None
    return tokenizer, config
