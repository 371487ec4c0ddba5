"""Numbers are given back once, in order, and never waited for unless asked."""

from __future__ import annotations

import pytest
import torch

from softs_lightning.noticing import Noticing


def test_numbers_of_a_cpu_are_known_at_once_and_given_once() -> None:
    noticing = Noticing()
    value = torch.tensor(2.0, requires_grad=True)
    noticing.put("a", value * 3)
    noticing.put("b", value)
    found = list(noticing.known())
    assert [(note, v.item(), v.requires_grad) for note, v in found] == [("a", 6.0, False), ("b", 2.0, False)]
    assert not list(noticing.known(wait=True))


class Event:
    """Stands in for an accelerator's event: done when it is told to be."""

    def __init__(self) -> None:
        self.done = False
        self.waited = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.waited = self.done = True


def test_what_is_not_done_yet_holds_back_what_came_after_it() -> None:
    noticing, first, second = Noticing(), Event(), Event()
    for note, event in (("first", first), ("second", second)):
        noticing._waiting.append((note, torch.ones(1), event))  # type: ignore[arg-type]
    second.done = True
    assert not list(noticing.known())
    first.done = True
    assert [note for note, _ in noticing.known()] == ["first", "second"]
    assert not first.waited
    third = Event()
    noticing._waiting.append(("third", torch.ones(1), third))  # type: ignore[arg-type]
    assert [note for note, _ in noticing.known(wait=True)] == ["third"]
    assert third.waited


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, which computes on its own")
def test_a_gpu_is_not_waited_for() -> None:
    noticing = Noticing()
    torch.cuda._sleep(10**9)
    noticing.put("late", torch.ones(1, device="cuda") * 2)
    assert not list(noticing.known())
    assert [(note, v.item()) for note, v in noticing.known(wait=True)] == [("late", 2.0)]
