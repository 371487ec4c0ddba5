"""A trace that computes nothing: what shapes a model has where."""

from typing import Any

import torch
from torch import nn

from softs_lightning.tracing.batching import Inputs, map_tensors
from softs_lightning.tracing.baton import surely
from softs_lightning.tracing.saving import Saves
from softs_lightning.tracing.tracer import InterleavingTracer, tree

__all__ = ["ScanningTracer"]


class ScanningTracer(InterleavingTracer):
    """An `InterleavingTracer` that runs the model under fake tensors: no compute, no weights.

    Read shapes, dtypes and devices, and save those; fake tensors hold no data, in the block or after it. On a
    model with meta weights, the input is moved to the meta device too. Attributes that the model set on its
    modules meanwhile are set back, because they hold fake tensors.
    """

    def _interleave(self, inputs: Inputs, saves: Saves) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        assert self.envoy is not None
        modules = tree(self.envoy.module)
        before = [
            (each, dict(each.__dict__), dict(each._buffers), dict(each._parameters))
            for each in modules.values()
        ]
        meta = any(each.is_meta for each in self.envoy.module.parameters())
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(assume_static_by_default=True))
        around = torch._C._get_dispatch_mode(mode._mode_key)

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if meta and not tensor.is_meta:
                moved = tensor.detach().to("meta")
                tensor = (
                    nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
                )
            return mode.from_tensor(tensor, static_shapes=True)

        def faked(state: dict[str, Any]) -> dict[str, Any]:
            return {name: None if each is None else fake(each) for name, each in state.items()}

        def run() -> None:
            for module, _, buffers, parameters in before:  # what is real is computed with, fake mode or not
                module._buffers.update(faked(buffers))
                module._parameters.update(faked(parameters))
            with mode:
                trace(map_tensors(fake, inputs), saves)

        def restore() -> None:
            if torch._C._get_dispatch_mode(mode._mode_key) is mode:  # Ctrl-C came as it was being left
                torch._C._unset_dispatch_mode(mode._mode_key)
                if around is not None:
                    torch._C._set_dispatch_mode(around)
            for module, attributes, buffers, parameters in before:
                _restore(module.__dict__, attributes)
                _restore(module._buffers, buffers)
                _restore(module._parameters, parameters)

        trace = super()._interleave
        surely(run, restore)


def _restore(live: dict[str, Any], before: dict[str, Any]) -> None:
    live.clear()
    live.update(before)
