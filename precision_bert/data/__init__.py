"""Text data: GLUE through tfds, length-bucketed batches, and the built-in demo pairs."""

from precision_bert.data.batching import encode_batches
from precision_bert.data.demo import demo_pairs, demo_vocabulary
from precision_bert.data.encoding import sort_by_length
from precision_bert.data.examples import TextExamples
from precision_bert.data.glue import load_glue
from precision_bert.data.glue_tasks import GLUE_TASKS, GlueTask
from precision_bert.data.mrpc_gold import read_mrpc_gold

__all__ = [
    "GLUE_TASKS",
    "GlueTask",
    "TextExamples",
    "demo_pairs",
    "demo_vocabulary",
    "encode_batches",
    "load_glue",
    "read_mrpc_gold",
    "sort_by_length",
]
