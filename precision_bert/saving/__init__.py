"""Models in files, and the state of their training."""

from precision_bert.saving.model_files import load_model, load_state, save_model

__all__ = ["load_model", "load_state", "save_model"]
