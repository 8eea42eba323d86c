"""What torch's own convolutions take is predicted exactly, in types that oneDNN is not used for."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.rules import cpu_scratch_bytes, taken_bytes

ATEN = torch.ops.aten
WANTED = ([True, True, True], [False, True, True], [True, False, False])
SHAPES = {
    "unfolded": {},
    "grouped": {"groups": 3},
    "dilated": {"dilation": 2, "padding": 2},
    "dilated, grouped": {"dilation": 2, "padding": 2, "groups": 3},
    "transposed": {"is_transposed": True, "stride": 2},
    "transposed, grouped": {"is_transposed": True, "groups": 3},
    "transposed and narrowed": {"is_transposed": True, "kernel": 1, "padding": 0},
    "pointwise": {"kernel": 1, "padding": 0},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_dims", [2, 3])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_groups_columns_and_sums_are_predicted_exactly(name, batch, num_dims, dtype):
    shape = {"kernel": 3, "stride": 1, "padding": 1, "dilation": 1, "groups": 1}
    shape |= {"is_transposed": False} | SHAPES[name]
    image = torch.randn(batch, 12, *(7, 6, 5)[:num_dims]).to(dtype)
    first, second = 9, 12 // shape["groups"]
    if shape["is_transposed"]:
        first, second = 12, 9 // shape["groups"]
    weight = torch.randn(first, second, *(shape["kernel"],) * num_dims).to(dtype)
    dims = [[shape[each]] * num_dims for each in ("stride", "padding", "dilation")]
    settings = (*dims, shape["is_transposed"], [0] * num_dims, shape["groups"])
    backend = torch._C._select_conv_backend(image, weight, None, *settings, None).name
    if not backend.startswith("Slow"):
        pytest.skip("oneDNN computes this type here")
    forward = (image, weight, torch.randn(9).to(dtype), *settings)
    out = ATEN.convolution(*forward)
    taken = taken_bytes(lambda: ATEN.convolution(*forward))
    assert cpu_scratch_bytes("convolution", *forward, out=out) == taken
    for wanted in WANTED:
        backward = (torch.randn_like(out), image, weight, [9], *settings, wanted)
        taken = taken_bytes(lambda backward=backward: ATEN.convolution_backward(*backward))
        assert cpu_scratch_bytes("convolution_backward", *backward) == taken
