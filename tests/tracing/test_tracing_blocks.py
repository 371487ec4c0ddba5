"""A block runs once, where it stands in the source, and what it saves comes back to where it stands."""

# ruff: noqa: PT012, SIM117 (a trace is a with statement with a body)

import ast
import asyncio
import dataclasses
import linecache
import os
import sys
import traceback

import pytest
import torch
from torch import nn

from softs_lightning.tracing import Envoy, WithBlockNotFoundError, save, source

X = torch.ones(2, 3)


@pytest.fixture
def model(net):
    return Envoy(net)


def test_the_body_runs_once(model):
    ran = []
    with model.trace(X):
        ran.append(1)
        model.first.output.save()
    assert ran == [1]


@pytest.mark.parametrize("nothing", ["pass", "...", "'text'", "global name", "name: int"])
def test_a_body_without_effect_is_fine(model, net, nothing):
    calls = []
    net.register_forward_hook(lambda *_: calls.append(1))
    names = run_as_file(f"with model.trace(X):\n    {nothing}\n", model=model, X=X)
    assert calls == [1]
    assert "name" not in names


def test_saved_names_come_back_and_others_do_not(model):
    kept = lost = "before"
    with model.trace(X):
        kept = model.first.output.save()
        lost = model.act.output
        never = lost * 2
    assert kept.shape == (2, 5)
    assert lost == "before"
    with pytest.raises(UnboundLocalError):
        never  # noqa: B018


def test_values_of_every_kind_are_saved(model):
    with model.trace(X):
        shape = model.first.output.shape.save()
        number = shape[0].save()
        inputs = model.second.inputs.save()
        text = save("text")
        pair = a, b = (shape, [1, 2]).save()
    assert (shape, number, text) == ((2, 5), 2, "text")
    assert type(inputs) is tuple
    assert (a, b) == pair
    with pytest.raises(AttributeError):
        _ = shape.save


def test_an_object_keeps_its_own_save(model):
    class Figure:
        def save(self) -> str:
            return "to disk"

    figure, said = Figure(), []
    with model.trace(X):
        said.append(figure.save())
        model.first.output.save()
    assert said == ["to disk"]


def test_outer_objects_are_changed_without_saving(model):
    found: dict[str, torch.Tensor] = {}
    with model.trace(X):
        found["first"] = model.first.output
    assert found["first"].shape == (2, 5)


def test_rebinding_reads_the_old_value_first(model):
    total = 1
    with model.trace(X):
        total = save(total + int(model.first.output.shape[1]))
    assert total == 6


def test_functions_and_comprehensions_see_the_names_of_the_block(model):
    offset = 2
    with model.trace(X):
        hidden = model.first.output
        scale = 3

        def scaled(value):
            return value * scale + offset

        rows = [scaled(row).sum() for row in hidden if scale].save()
        direct = (lambda: hidden * scale)().save()
    assert torch.equal(torch.stack(rows), (direct + offset).sum(1))


def test_a_function_of_the_block_outlives_it(model):
    gradients = []
    with model.trace(X):
        factor = 2
        hidden = model.first.output
        hidden.register_hook(lambda gradient: gradients.append(gradient * factor))
        result = model.output.save()
    result.sum().backward()
    assert gradients[0].shape == (2, 5)


def test_the_target_and_the_variables_of_the_frame_are_there(model):
    holder = {}
    for number in range(2):
        with model.trace(X) as holder["tracer"]:
            result = holder["tracer"].result.save()
            seen = save(number)
        assert seen == number
    assert torch.equal(result, model.module(X))


def test_class_bodies_methods_and_private_names(model):
    class Probe:
        __width = 5
        with model.trace(X):
            attribute = model.first.output.save()

        def base(self):
            return "base"

    class Derived(Probe):
        def __init__(self) -> None:
            self.__own = "own"

        def base(self):
            return "derived"

        def read(self):
            with model.trace(X):
                own = save(self.__own)
                base = super().base().save()
                here = __class__.save()
                model.first.output.save()
            return own, base, here

    assert Probe.attribute.shape == (2, 5)
    assert Derived().read() == ("own", "base", Derived)


def test_a_class_in_a_block_sees_the_globals_and_the_names_of_the_block(model):
    with model.trace(X):
        width = 5

        class Probe(nn.Module):
            device = torch.device("cpu")
            shape = (2, width)

        @dataclasses.dataclass
        class Found:
            value: torch.Tensor
            of: type = Probe

        found = Found(model.first.output).save()
    assert (found.value.shape, found.of.device.type, found.of.shape) == ((2, 5), "cpu", (2, 5))


def test_private_names_are_mangled_as_in_the_method(model):
    class Method:
        def read(self):
            with model.trace(X):
                import os.path as __path

                given = dict(__a=__path.sep).save()  # noqa: C408
                mangled = save("_Method__path" in locals())
            return given, mangled

    assert Method().read() == ({"__a": os.path.sep}, True)


def test_closures_and_globals_are_rebound(model):
    cell = "old"

    def inner():
        nonlocal cell
        global REBOUND
        with model.trace(X):
            cell = save("new")
            REBOUND = save("global")
            model.first.output.save()

    inner()
    assert cell == "new"
    assert REBOUND == "global"


def test_a_function_of_the_block_with_a_global_statement(model):
    names = run_as_file(
        "count = 0\n"
        "with model.trace(X):\n"
        "    def more():\n        global count\n        count += 100000\n"
        "    more()\n    more()\n    count.save()\n    model.first.output.save()\n",
        model=model,
        X=X,
    )
    assert names["count"] == 200000


def test_async_functions_and_generators(model):
    async def read():
        await asyncio.sleep(0)
        with model.trace(X):
            hidden = model.first.output.save()
        await asyncio.sleep(0)
        return hidden

    def generate():
        for scale in (1, 2):
            with model.trace(X * scale):
                hidden = model.first.output.save()
            yield hidden

    hidden = asyncio.run(read())
    first, second = generate()
    assert torch.equal(hidden, first)
    assert torch.equal(second, model.first(X * 2))


def test_headers_over_several_lines(model):
    entered = []

    class Other:
        def __enter__(self):
            entered.append("in")

        def __exit__(self, *_):
            entered.append("out")

    with (
        Other(),
        model.trace(
            X,
        ) as tracer,
    ):
        hidden = model.first.output.save()
        entered.append("body")
        tracer.stop()
    assert hidden.shape == (2, 5)
    assert entered == ["in", "body", "out"]


def test_a_comment_or_text_at_column_zero_does_not_end_the_body(model):
    with model.trace(X):
        hidden = model.first.output.save()
        # a comment
        text = """
at column zero
""".save()
    assert hidden.shape == (2, 5)
    assert text == "\nat column zero\n"


def test_imports_and_eval_in_a_block(model):
    local = 4  # noqa: F841
    with model.trace(X):
        import math

        from softs_lightning.tracing import Envoy as imported

        value = save(eval("local + 1") + math.floor(1.5))
        same = save(imported is Envoy)
        model.first.output.save()
    assert value == 6
    assert same


def test_an_assertion_fails_on_its_line(model):
    with pytest.raises(AssertionError, match="because") as caught, model.trace(X):
        hidden = model.first.output
        assert hidden.shape == (0, 0), "because"
    assert "torch.Size([2, 5]) == (0, 0)" in str(caught.value)  # explained by pytest as anywhere else
    assert last_line(caught.value) == 'assert hidden.shape == (0, 0), "because"'


def test_an_error_comes_out_once_with_the_users_line_last(model):
    with pytest.raises(ZeroDivisionError) as caught:
        with model.trace(X):
            model.first.output.save()
            1 / 0  # noqa: B018
    error = caught.value
    assert error.__context__ is None
    assert error.__cause__ is None
    assert last_line(error).startswith("1 / 0")
    frames = traceback.extract_tb(error.__traceback__)
    name = "test_an_error_comes_out_once_with_the_users_line_last"
    assert [frame.name for frame in frames] == [name, name]  # the with statement, and the line


def test_an_error_of_a_trace_ends_on_the_line_that_asked(model):
    with pytest.raises(RuntimeError) as caught:
        with model.trace(X):
            model.second.output.save()
            helper(model)
    assert last_line(caught.value) == "return model.first.output"


def test_an_error_before_the_first_location_keeps_the_model_from_running(model, net):
    calls = []
    net.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(KeyError), model.trace(X):
        {}["missing"]
    assert calls == []


def test_what_was_saved_before_an_error_is_kept(model):
    with pytest.raises(KeyError), model.trace(X):
        hidden = model.first.output.save()
        {}["missing"]
    assert hidden.shape == (2, 5)


def test_an_error_in_handling_another_keeps_both(model):
    with pytest.raises(KeyError) as caught:
        with model.trace(X):
            hidden = model.first.output
            try:
                hidden.missing  # noqa: B018
            except AttributeError:
                {}["missing"]
    assert isinstance(caught.value.__context__, AttributeError)
    assert caught.value.__context__.__context__ is None


def test_an_error_of_the_model_comes_out_as_itself(model):
    with pytest.raises(RuntimeError, match="mat1 and mat2") as caught:
        with model.trace(torch.ones(2, 7)):
            model.second.output.save()
    assert caught.value.__context__ is None


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("with model.trace(X): ran.append(1)\n", ValueError, "on lines of its own"),
        (
            "with model.trace(X):\n    try:\n        ran.append(1)\n    finally: pass\n",
            ValueError,
            "cannot start with try",
        ),
        (
            "with model.trace(X):\n    pass\n    try:\n        ran.append(1)\n    finally: pass\n",
            ValueError,
            "try:",
        ),
        ("with model.trace(X), open('f'):\n    ran.append(1)\n", ValueError, "the last item"),
        ("with model.trace(X), model.trace(X):\n    ran.append(1)\n", ValueError, "the last item"),
        (
            "def f():\n    with model.trace(X):\n        return ran.append(1)\nf()\n",
            SyntaxError,
            "'return' outside",
        ),
        (
            "for _ in X:\n    with model.trace(X):\n        ran.append(1)\n        break\n",
            SyntaxError,
            "'break' outside",
        ),
        (
            "async def f():\n    with model.trace(X):\n        await ran\nf().send(None)\n",
            SyntaxError,
            "await",
        ),
        ("def f():\n    with model.trace(X):\n        yield ran\nnext(f())\n", SyntaxError, "yield"),
    ],
)
def test_what_cannot_be_captured_is_refused_before_anything_runs(model, net, code, error, message):
    ran: list[int] = []
    net.register_forward_pre_hook(lambda *_: ran.append(2))
    tracer = sys.gettrace()
    with pytest.raises(error, match=message):
        run_as_file(code, model=model, X=X, ran=ran)
    assert ran == []
    assert sys.gettrace() is tracer


def test_no_source_names_the_function_form(model):
    with pytest.raises(WithBlockNotFoundError, match=r"its source is not available.*`@model.trace"):
        exec("with model.trace(X):\n    y = model.output.save()\n", {"model": model, "X": X})


def test_source_that_has_changed_is_refused(model, tmp_path):
    path = tmp_path / "script.py"
    path.write_text("with model.trace(X):\n    first = model.first.output.save()\n")
    code = compile(path.read_text(), str(path), "exec")
    path.write_text("with model.trace(X):\n    other = model.first.output.save()\n")
    with pytest.raises(WithBlockNotFoundError, match="the source has changed"):
        exec(code, {"model": model, "X": X})


def test_dynamic_source_is_found_in_linecache(model):
    names = run_as_file("with model.trace(X):\n    hidden = model.first.output.save()\n", model=model, X=X)
    assert torch.equal(names["hidden"], model.first(X))


def test_a_site_is_parsed_once(model, monkeypatch):
    parsed = []
    parse = ast.parse
    monkeypatch.setattr(
        source.ast, "parse", lambda *args, **kwargs: parsed.append(1) or parse(*args, **kwargs)
    )
    for _ in range(3):
        with model.trace(X):
            model.first.output.save()
    assert parsed == [1]


def test_redefined_functions_do_not_meet_an_older_body(model):
    results = []
    for name in ("first", "second"):
        code = f"def f():\n    with model.trace(X):\n        found = model.{name}.output.save()\n    return found\n"
        results.append(run_as_file(code, model=model, X=X)["f"]().shape[1])
    assert results == [5, 2]


def test_the_threads_trace_function_survives(model):
    events = []

    def tracer(frame, event, argument):
        if frame.f_code.co_name == "traced":
            events.append(frame.f_lineno)
            return tracer
        return None

    def traced():
        with model.trace(X):
            hidden = model.first.output.save()
        return hidden  # noqa: RET504

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        traced()
        after = sys.gettrace()
    finally:
        sys.settrace(before)
    assert after is tracer
    first = traced.__code__.co_firstlineno
    assert events[-1] == first + 3  # the line after the block is seen
    assert first + 2 in events  # so is the block itself, on its thread


def test_a_function_is_a_block(model):
    @model.trace(X)
    def found(tracer):
        hidden = model.first.output.save()
        tracer.stop()
        return hidden

    assert torch.equal(found, model.first(X))


def test_a_function_without_source_is_a_block(model):
    names = {"model": model, "X": X}
    exec("@model.trace(X)\ndef found():\n    return model.first.output\n", names)
    assert torch.equal(names["found"], model.first(X))


def test_functions_that_are_no_blocks_are_refused(model):
    with pytest.raises(TypeError, match="cannot be a block"):
        model.trace(X)(lambda one, two: None)
    with pytest.raises(TypeError, match="cannot be a block"):
        model.trace(X)(lambda *, key: None)

    async def coroutine():
        pass

    with pytest.raises(TypeError, match="coroutine"):
        model.trace(X)(coroutine)


def test_saving_by_method_in_a_function_is_for_tensors_and_says_so(model):
    with pytest.raises(AttributeError) as caught:
        model.trace(X)(lambda: model.first.inputs.save())
    assert "call save(value)" in caught.value.__notes__[0]


def test_a_program_returns_what_it_saved(model):
    def program(model, tracer):
        hidden = save(model.first.output, "hidden")
        tracer.stop()
        return {"norm": hidden.norm()}

    found = model.run(program, X)
    assert torch.equal(found["hidden"], model.first(X))
    assert torch.equal(found["norm"], model.first(X).norm())
    assert list(found) == ["hidden", "norm"]


def test_a_program_runs_along_a_method(model, net):
    def program(model, tracer):
        for step in tracer.iter[:]:
            save(model.second.output, f"step {step}")

    found = model.run(program, X, method="generate", steps=2)
    assert list(found) == ["step 0", "step 1"]
    assert torch.equal(found["step 0"], net.second(torch.tanh(net.first(X))))


def test_a_program_averages_over_two_inputs(model):
    def program(model, tracer):
        @tracer.invoke(X)
        def whole():
            return model.first.output

        @tracer.invoke(X * 3)
        def other():
            save(model.first.output * 0.5, "half")

        return {"whole": whole}

    found = model.run(program)
    assert torch.equal(found["whole"], model.first(X))
    assert torch.equal(found["half"], model.first(X * 3) * 0.5)


def test_a_program_is_scanned(model):
    found = model.run(lambda model: {"width": model.second.output.shape[-1]}, X, scan=True)
    steps = model.run(
        lambda model: {"shape": model.second.output.shape}, X, scan=True, method="generate", steps=1
    )
    assert found == {"width": 2}
    assert steps == {"shape": (2, 2)}


def test_programs_that_return_something_else_or_the_same_twice_are_refused(model):
    with pytest.raises(TypeError, match="returned a Tensor; return a mapping"):
        model.run(lambda model: model.first.output, X)
    with pytest.raises(ValueError, match="both saved and returned a"):
        model.run(lambda model: {"a": save(model.first.output, "a")}, X)
    with pytest.raises(ValueError, match="two values were saved under the name 'a'"):
        model.run(lambda model: save(model.first.output, "a") is save(model.second.output, "a"), X)


def helper(model):
    return model.first.output


def last_line(error: BaseException) -> str:
    return traceback.extract_tb(error.__traceback__)[-1].line


def run_as_file(code: str, **names: object) -> dict[str, object]:
    """Run ``code`` the way a notebook does: its source is in linecache, under a name of its own."""
    filename = f"<cell {len(linecache.cache)} {id(code)}>"
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    exec(compile(code, filename, "exec"), names)
    return names
