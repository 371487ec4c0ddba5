"""The current device and stream of CUDA hold in blocks."""

import pytest
import torch
from torch import nn

from softs_lightning.tracing import Envoy, save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def test_the_stream_and_the_device_of_the_caller_hold_in_the_block():
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh()).cuda()
    model, x = Envoy(net), torch.ones(2, 3, device="cuda")
    device, stream = torch.cuda.device_count() - 1, torch.cuda.Stream(torch.cuda.device_count() - 1)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        with model.trace(x):
            inside = save((torch.cuda.current_device(), torch.cuda.current_stream()))
            hidden = model[0].output.save()
        assert (torch.cuda.current_device(), torch.cuda.current_stream()) == inside
    assert inside == (device, stream)
    torch.cuda.synchronize()
    assert torch.equal(hidden, net[0](x))


def test_autocast_of_cuda_holds_in_the_block():
    net = nn.Linear(3, 5).cuda()
    model, x = Envoy(net), torch.ones(2, 3, device="cuda")
    with torch.autocast("cuda", torch.bfloat16), model.trace(x):
        product = (model.output @ model.output.T).save()
    assert product.dtype is torch.bfloat16


def test_a_cache_moves_to_the_cpu_by_default():
    net = nn.Linear(3, 5).cuda()
    model, x = Envoy(net), torch.ones(2, 3, device="cuda")
    with model.trace(x) as tracer:
        cache = tracer.cache()
        kept = tracer.cache(device=None)
    assert cache.model.output.device.type == "cpu"
    assert kept.model.output.device.type == "cuda"
    assert torch.equal(cache.model.output, net(x).detach().cpu())
