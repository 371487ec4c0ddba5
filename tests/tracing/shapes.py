"""Checks of the part of the tracer that needs no torch, to be run by any Python from 3.11 on: ``python shapes.py``.

Every function whose name starts with ``check`` is one check. They are captured blocks of every shape, and runs
of a toy model whose modules are plain objects.
"""

# ruff: noqa: SIM117, E701, RET504, B012, C416, E402 (the shapes are the point)

import asyncio
import sys
import threading
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]
for name in ("softs_lightning", "softs_lightning.tracing"):  # without their __init__, which may import torch
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(ROOT / name.replace(".", "/"))]
        sys.modules[name] = package

from softs_lightning.tracing.capture import Capturing
from softs_lightning.tracing.errors import OutOfOrderError, WithBlockNotFoundError
from softs_lightning.tracing.interleave import Run
from softs_lightning.tracing.iterations import Barrier, Iterations
from softs_lightning.tracing.saving import Saves, save
from softs_lightning.tracing.worker import ACTIVE, OUTPUT, RESULT, Worker, current_worker


class Captured(Capturing):
    """Runs its block on the way out and hands every name back."""

    def __init__(self) -> None:
        self.ran = 0

    def _save(self, value):
        return value

    def _execute(self, body):
        self.ran += 1
        try:
            body.run()
        finally:
            body.push(lambda value: True)


class Toy:
    """A model of numbered modules: each adds its number to what it is given."""

    def __init__(self, *numbers):
        self.numbers = numbers

    def __call__(self, value):
        for number in self.numbers:
            value = ACTIVE.run.visit(number, lambda value, number=number: value + number, (value,), {})
        return value


class Traced(Capturing):
    def __init__(self, toy, value, *more):
        self.toy, self.value, self.bodies = toy, value, list(more)

    def _save(self, value):
        return save(value)

    def _execute(self, body):
        saves = Saves()
        members = dict.fromkeys(self.toy.numbers, 0)
        run = Run([Worker(body)], members, saves, lambda key, kind: f"toy.{key}.{kind}")
        try:
            run.drive(lambda: self.toy(self.value))
        finally:
            run.close()
            body.push(saves.keeps)


def read(number):
    return current_worker("a toy").read(number, OUTPUT, f"toy.{number}.output")


def write(number, value):
    current_worker("a toy").write(number, OUTPUT, f"toy.{number}.output", value)


def result():
    return current_worker("a toy").read(RESULT, OUTPUT, "result")


def raises(kind, function):
    try:
        function()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def check_function():
    a = 1
    with Captured() as tracer:
        b = a + 1
        a = 5
        c = [b * n for n in range(3)]
        d = (lambda: b + a)()
    assert (tracer.ran, a, b, c, d) == (1, 5, 2, [0, 2, 4], 7)


def check_closure():
    a = 1

    def inner():
        nonlocal a
        with Captured():
            a = a + 1
        return a

    assert inner() == 2 == a


def check_class_body():
    outer = 1

    class Body:
        own = 2
        with Captured():
            here = own + outer

    assert Body.here == 3


def check_method():
    class Base:
        def value(self):
            return 1

    class Derived(Base):
        def value(self):
            self.__private = 3
            with Captured():
                total = super().value() + self.__private
            return total

    assert Derived().value() == 4


def check_async():
    async def work():
        with Captured():
            a = 1
        await asyncio.sleep(0)
        return a

    assert asyncio.run(work()) == 1


def check_generator():
    def work():
        for n in range(2):
            with Captured():
                a = n
            yield a

    assert list(work()) == [0, 1]


def check_module_and_comprehension_at_module_level():
    assert MODULE_LEVEL == [1, 2, 3]


# fmt: off
def check_header_and_comments():
    with (
        Captured() as first,
    ):
        a = 1
# at column zero
        b = """
text
"""
    assert (first.ran, a, b) == (1, 1, "\ntext\n")
# fmt: on


def check_first_statements():
    with Captured() as tracer:
        pass
    with Captured():
        a = 1
    with Captured():
        for n in range(2):
            b = n
    with Captured():

        @str
        def c():
            pass

    with Captured():
        if a:
            d = 1
    with Captured():
        while True:
            try:
                e = 1
            finally:
                break
    with Captured():
        with Captured():
            f = 1
    with Captured():
        assert a, "no"
        g: int = 1
    with Captured():
        import sys as h
    with Captured():
        match a:
            case 1:
                i = 1
    with Captured():
        del a
        j = 1
    assert (tracer.ran, b, type(c), d, e, f, g, h, i, j) == (1, 1, str, 1, 1, 1, 1, sys, 1, 1)


def check_refused():
    # fmt: off
    def one_line():
        with Captured(): raise AssertionError
    # fmt: on

    def try_first():
        with Captured():
            try:
                raise AssertionError
            finally:
                pass

    def not_last():
        with Captured(), open(__file__):
            raise AssertionError

    def returns():
        with Captured():
            return 1

    for function in (one_line, try_first, not_last):
        raises(ValueError, function)
    raises(SyntaxError, returns)
    raises(WithBlockNotFoundError, lambda: exec("with Captured():\n    a = 1\n", {"Captured": Captured}))


def check_errors():
    def fails():
        with Captured():
            a = 1
            raise KeyError(a)

    error = raises(KeyError, fails)
    last = error.__traceback__
    while last.tb_next is not None:
        last = last.tb_next
    assert error.__context__ is None
    assert last.tb_lineno == fails.__code__.co_firstlineno + 3
    assert last.tb_frame.f_code.co_name == "fails"


def check_trace_function_is_restored():
    def tracer(*_):
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        with Captured():
            a = 1
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    assert a == 1
    assert after is tracer


def check_run():
    toy = Toy(1, 10, 100)
    with Traced(toy, 0):
        first = save(read(1))
        write(10, read(10) * 2)
        whole = save(result())
        lost = "lost"
    assert (first, whole) == (1, 122)
    assert "lost" not in locals()
    assert threading.active_count() == 1


def check_run_out_of_order():
    def late():
        with Traced(Toy(1, 10), 0):
            save(read(10))
            save(read(1))

    def never():
        with Traced(Toy(1, 10), 0):
            for _ in Iterations()[3]:
                save(read(10))

    assert "toy.1.output was asked for after" in str(raises(OutOfOrderError, late))
    assert "(visit 3) was not reached" in str(raises(OutOfOrderError, never))
    assert threading.active_count() == 1


def check_run_in_steps():
    toy = Toy(1, 10, 1, 10, 1)
    found = []
    with Traced(toy, 0):
        for step in Iterations()[:]:
            found.append((step, read(1)))
        found.append(result())
    assert found == [(0, 1), (1, 12), (2, 23), 23]


def check_barrier_needs_its_blocks():
    def alone():
        with Traced(Toy(1), 0):
            Barrier(2)()

    assert "was reached by 1 of them" in str(raises(ValueError, alone))


with Captured():
    MODULE_LEVEL = [1, 2]
    MODULE_LEVEL = [n for n in MODULE_LEVEL] + [len(MODULE_LEVEL) + 1]


CHECKS = {name: value for name, value in dict(globals()).items() if name.startswith("check")}

if __name__ == "__main__":
    assert "torch" not in sys.modules
    for check in CHECKS.values():
        check()
    assert "torch" not in sys.modules
    print(f"{len(CHECKS)} checks passed on Python {sys.version_info.major}.{sys.version_info.minor}")
