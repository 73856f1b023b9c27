"""Functions of torch while a step is watched: called as people call them, by several threads, and afterwards."""

from __future__ import annotations

import copy
import threading
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from dpbench.privacy.record_axis import Axis, RecordAxis, new_axis
from dpbench.privacy.record_axis.host import watched


def records(axis: RecordAxis) -> Tensor:
    x = torch.arange(8.0).view(4, 2)
    axis.tag(x, Axis(0))
    return x


def test_arguments_by_name() -> None:
    axis = new_axis(4)
    target = torch.arange(4)
    axis.tag(target, Axis(0))
    with watched(axis), axis:
        x = records(axis)
        assert F.one_hot(input=target, num_classes=4).shape == (4, 4)
        assert F.cross_entropy(input=x, target=target % 2, label_smoothing=0.1).shape == ()
        assert torch.tensor(data=[1.0, 2.0]).shape == (2,)
        x.clone().requires_grad_().register_hook(hook=lambda gradient: None)
    assert not axis.reads and axis.has_hooks


def test_a_copy_of_public_tensors_is_torchs_own() -> None:
    axis = new_axis(4)
    public = torch.rand(3, requires_grad=True)
    public.grad = torch.ones(3)
    with watched(axis), axis:
        made = torch.rand(3)
        copied, again, of_records = copy.deepcopy((public, made, records(axis)))
    assert torch.equal(copied.grad, public.grad)
    assert torch.equal(again, made)
    assert axis.place_of(of_records) == Axis(0) and not axis.reads


def test_threads_are_told_apart_and_leave_nothing_behind() -> None:
    before = (Tensor.tolist, torch.tensor, threading.Thread.start, Tensor.__repr__, F.cross_entropy)
    reads = {}

    def run(number: int) -> None:
        for _ in range(30):
            axis = new_axis(4)
            with watched(axis), axis:
                x = records(axis)
                time.sleep(0.001)
                if number:
                    x.tolist()
            reads.setdefault(number, []).append(len(axis.reads))

    threads = [threading.Thread(target=run, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(reads[0]) == {0} and set(reads[1]) == {1}
    assert (Tensor.tolist, torch.tensor, threading.Thread.start, Tensor.__repr__, F.cross_entropy) == before
