"""The queue of samples. See `queue.py`."""

from holdfast.transfer.queue.batch import Batch
from holdfast.transfer.queue.putting import Item
from holdfast.transfer.queue.queue import Queue
from holdfast.transfer.queue.records import Sample
from holdfast.transfer.queue.samplers import (
    Sampler,
    balanced,
    in_order,
    weighted,
    whole_groups,
)
from holdfast.transfer.queue.sync import SyncBatch, SyncQueue, open_queue

__all__ = [
    "Batch",
    "Item",
    "Queue",
    "Sample",
    "Sampler",
    "SyncBatch",
    "SyncQueue",
    "balanced",
    "in_order",
    "open_queue",
    "weighted",
    "whole_groups",
]
