"""Which attention kernel CUDA would choose, and what it takes unseen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memfit.errors import RecordingError
from memfit.figures import Certainty
from memfit.kernels.cuda.attention_choice import (
    AttentionCall,
    choose_attention,
    efficient_alignment,
)
from memfit.kernels.cuda.attention_scratch import attention_scratch
from memfit.kernels.scratch import Scratch

T4, A100, A10, L4, H100, B200, THOR, RTX_5090 = (
    (7, 5),
    (8, 0),
    (8, 6),
    (8, 9),
    (9, 0),
    (10, 0),
    (11, 0),
    (12, 0),
)
CALL = AttentionCall(
    capability=A100,
    torch_version=(2, 13),
    dtype="bfloat16",
    batch=4,
    query_heads=12,
    key_heads=12,
    query_length=1024,
    key_length=1024,
    head_dim=64,
    value_head_dim=64,
    is_causal=True,
)
MASKED = replace(CALL, is_causal=False, has_mask=True)
GROUPED = replace(CALL, key_heads=4, enable_gqa=True)


def chosen(call: AttentionCall = CALL, **changes: object) -> str:
    """Choose a kernel for a call with changes."""
    return choose_attention(replace(call, **changes))


def heads_of(dim: int) -> dict[str, int]:
    return {"head_dim": dim, "value_head_dim": dim}


HEADS_OF_SMALL_CARDS = [
    ("flash", heads_of(192) | {"dropout": 0.1}),
    ("efficient", heads_of(200)),
    ("efficient", heads_of(224)),
    ("flash", heads_of(256)),
    ("efficient", heads_of(256) | {"dropout": 0.1}),
    ("efficient", heads_of(264)),
]
CHOICES = [
    # Half precision without a mask is flash from Ampere on, and the decomposition before.
    *(("flash", CALL, {"capability": card}) for card in (A100, A10, L4, RTX_5090, THOR)),
    ("math", CALL, {"capability": T4}),
    ("efficient", CALL, {"capability": T4, "dtype": "float16"}),
    # Hopper and data-centre Blackwell prefer cuDNN from 2.11 on; older than the table is as 2.5.
    *(("flash", CALL, {"capability": card, "torch_version": (2, 10)}) for card in (H100, B200)),
    *(("cudnn", CALL, {"capability": card, "torch_version": (2, 11)}) for card in (H100, B200)),
    ("flash", CALL, {"capability": H100, "torch_version": (2, 4)}),
    # float32 is memory-efficient, float64 the decomposition.
    *(("efficient", CALL, {"capability": card, "dtype": "float32"}) for card in (T4, A100, H100)),
    ("math", CALL, {"dtype": "float64"}),
    # A mask turns flash away, and one with a gradient cuDNN as well.
    ("efficient", MASKED, {}),
    ("efficient", MASKED, {"capability": RTX_5090}),
    ("cudnn", MASKED, {"capability": H100}),
    ("efficient", MASKED, {"capability": H100, "mask_requires_grad": True}),
    # So do a causal mask over unequal lengths, and head dimensions that differ.
    ("efficient", CALL, {"query_length": 512}),
    ("efficient", CALL, {"head_dim": 96, "value_head_dim": 64}),
    # The flash backward of small cards has gaps in its head dimensions; its forward has none.
    *(
        (backend, CALL, {"capability": card, **changes})
        for card in (L4, RTX_5090)
        for backend, changes in HEADS_OF_SMALL_CARDS
    ),
    ("flash", CALL, {"capability": L4, **heads_of(200), "requires_grad": False}),
    # Flash pads odd head dimensions, the efficient kernel does not.
    ("flash", CALL, heads_of(60)),
    ("math", MASKED, heads_of(60)),
    ("efficient", CALL, {"dtype": "float32", **heads_of(60)}),
    ("math", CALL, {"dtype": "float32", **heads_of(62)}),
    # Grouped heads take flash or cuDNN, but not the efficient kernel before 2.14.
    ("flash", GROUPED, {}),
    ("cudnn", GROUPED, {"capability": H100}),
    ("math", GROUPED, {"is_causal": False, "has_mask": True}),
    ("efficient", GROUPED, {"is_causal": False, "has_mask": True, "torch_version": (2, 14)}),
    # Heads that do not divide, or are unequal without the flag, are left to the decomposition.
    ("math", GROUPED, {"key_heads": 5}),
    ("math", GROUPED, {"enable_gqa": False}),
    # One key head is broadcast, and unbatched inputs are fused, from 2.14 on.
    ("math", CALL, {"key_heads": 1}),
    ("flash", CALL, {"key_heads": 1, "torch_version": (2, 14)}),
    ("math", CALL, {"num_dims": 3}),
    ("flash", CALL, {"num_dims": 3, "torch_version": (2, 14)}),
    # Inputs with a stride in the last dimension are left to the decomposition.
    ("math", CALL, {"has_unit_stride": False}),
    ("flash", CALL, {"has_unit_stride": False, **heads_of(1)}),
    # A dropout between sixteenths turns cuDNN away from 2.12 on.
    ("cudnn", CALL, {"capability": H100, "torch_version": (2, 11), "dropout": 0.1}),
    ("flash", CALL, {"capability": H100, "torch_version": (2, 12), "dropout": 0.1}),
    ("cudnn", CALL, {"capability": H100, "torch_version": (2, 11), "dropout": 0.125}),
    ("cudnn", CALL, {"capability": H100, "torch_version": (2, 12), "dropout": 0.125}),
    # cuDNN takes no single key, and no dropout on a single query.
    ("flash", CALL, {"capability": H100, "is_causal": False, "key_length": 1}),
    ("cudnn", CALL, {"capability": H100, "is_causal": False, "query_length": 1}),
    ("flash", CALL, {"capability": H100, "is_causal": False, "query_length": 1, "dropout": 0.5}),
    (
        "flash",
        CALL,
        {"capability": B200, "is_causal": False, "query_length": 1, "torch_version": (2, 14)},
    ),
    # Empty sequences are left to the decomposition.
    ("math", CALL, {"query_length": 0, "key_length": 0}),
    # What the user disables is passed over.
    ("efficient", CALL, {"flash_enabled": False}),
    ("math", CALL, {"flash_enabled": False, "efficient_enabled": False}),
    (
        "cudnn",
        CALL,
        {"flash_enabled": False, "efficient_enabled": False, "math_enabled": False},
    ),
    ("flash", CALL, {"capability": H100, "cudnn_enabled": False}),
]


@pytest.mark.parametrize(("backend", "call", "changes"), CHOICES)
def test_the_kernel_of_a_call_is_the_one_that_torch_chooses(backend, call, changes):
    assert chosen(call, **changes) == backend


@pytest.mark.parametrize(
    ("version", "dims", "requires_grad", "backend"),
    [
        ((2, 13), (192, 128), True, "cudnn"),
        ((2, 13), (256, 256), True, "flash"),
        ((2, 14), (256, 256), True, "cudnn"),
        ((2, 14), (160, 160), True, "flash"),
        ((2, 14), (160, 160), False, "cudnn"),
        ((2, 14), (60, 60), True, "flash"),
    ],
)
def test_cudnn_takes_the_head_dimensions_of_its_version(version, dims, requires_grad, backend):
    changes = {"head_dim": dims[0], "value_head_dim": dims[1], "requires_grad": requires_grad}
    assert chosen(capability=H100, torch_version=version, **changes) == backend


@pytest.mark.parametrize(
    ("card", "dtype", "alignment"),
    [
        (A100, "float16", 8),
        (A100, "float32", 4),
        (T4, "float16", 8),
        (T4, "float32", 1),
        ((6, 1), "float16", 1),
    ],
)
def test_the_efficient_kernel_aligns_head_dimensions_to_128_bits_where_it_uses_tensor_cores(
    card, dtype, alignment
):
    assert efficient_alignment(card, dtype) == alignment


def test_nothing_that_fits_is_an_error_with_a_remedy():
    with pytest.raises(RecordingError, match=r"enabled are flash\. Enable SDPBackend\.MATH"):
        chosen(dtype="float32", efficient_enabled=False, cudnn_enabled=False, math_enabled=False)


def forward(backend: str, call: AttentionCall = CALL) -> Scratch:
    return attention_scratch(backend, call, is_backward=False)


def backward(backend: str, call: AttentionCall = CALL) -> Scratch:
    return attention_scratch(backend, call, is_backward=True)


def test_the_decomposition_hides_nothing():
    assert forward("math").blocks == backward("math").blocks == ()
    assert forward("math").certainty is Certainty.EXACT


def test_flash_accumulates_queries_in_float32_over_rounded_shapes():
    call = replace(CALL, query_length=900, head_dim=72, value_head_dim=72)
    rows = 4 * 12 * 1024  # 900 queries are rounded to 1024
    assert backward("flash", call).blocks == (rows * 4, rows * 96 * 4)
    assert backward("flash", call).certainty is Certainty.EXACT
    assert forward("flash", call).blocks == ()


def test_flash_rounds_large_head_dimensions_to_256():
    call = replace(CALL, head_dim=200, value_head_dim=200)
    assert backward("flash", call).blocks[1] == 4 * 12 * 1024 * 256 * 4


def test_flash_expands_the_gradients_of_grouped_heads():
    plain = backward("flash", CALL).num_bytes
    grouped = backward("flash", GROUPED).num_bytes
    assert grouped - plain == 2 * 4 * 12 * 1024 * 64 * 2


def test_a_call_that_flash_may_split_is_no_longer_exact():
    call = replace(CALL, batch=1, query_heads=4, key_heads=4, query_length=256)
    assert backward("flash", call).certainty is Certainty.TABLE


def test_the_efficient_backward_takes_a_tile_and_a_lock_for_each_block_of_queries():
    scratch = backward("efficient", CALL)
    heads, tiles = 4 * 12, 1024 // 64
    delta = heads * 1024 * 4
    workspace = heads * tiles * (16 + 64 * 64 * 4)
    assert scratch.blocks == (delta, workspace)
    assert scratch.certainty is Certainty.EXACT


def test_the_efficient_backward_of_large_cards_takes_larger_tiles_for_head_dimension_128():
    call = replace(CALL, head_dim=128, value_head_dim=128)
    large = backward("efficient", call).blocks[1]
    small = backward("efficient", replace(call, capability=L4)).blocks[1]
    heads = 4 * 12
    assert large == heads * 8 * (16 + 128 * 128 * 4)
    splits = 200 // heads  # bounded, because keys and values are added up as well
    assert small == heads * (splits * 64 * 256 * 4 + 16 * 2 * (16 + 64 * 64 * 4))


def test_a_card_with_little_shared_memory_has_a_kernel_for_head_dimension_96():
    call = replace(CALL, capability=L4, head_dim=96, value_head_dim=96)
    heads = 4 * 12
    workspace = heads * 8 * 2 * (16 + 128 * 64 * 4)
    assert backward("efficient", call).blocks[1] == workspace
    dropped = replace(call, dropout=0.1)
    assert backward("efficient", dropped).blocks[1] != workspace


def test_turing_keeps_head_dimension_128_in_registers_but_not_more():
    call = replace(CALL, capability=T4, dtype="float16", head_dim=128, value_head_dim=128)
    heads, tile = 4 * 12, 16 + 128 * 64 * 4
    assert backward("efficient", call).blocks[1] == heads * 8 * 2 * tile
    call = replace(call, head_dim=160, value_head_dim=160)
    added = 4 * 64 * 512 * 4  # four parts of the keys, two head dimensions rounded to 256
    workspace = heads * (8 * 3 * tile + added)
    assert backward("efficient", call).blocks[1] == workspace


def test_float32_multiplies_gradient_and_output_before_the_workspace():
    call = replace(CALL, dtype="float32", head_dim=128, value_head_dim=128)
    rows = 4 * 12 * 1024
    blocks = backward("efficient", call).blocks
    assert blocks == (rows * 4, rows * 4, rows * 128 * 4)


def test_a_head_dimension_above_128_accumulates_the_output_in_the_forward():
    call = replace(CALL, head_dim=256, value_head_dim=256)
    assert forward("efficient", call).num_bytes == 4 * 12 * 1024 * 256 * 4
    assert forward("efficient", replace(call, dtype="float32")).num_bytes == 0


def test_the_efficient_backward_expands_grouped_heads():
    plain = backward("efficient", replace(CALL, torch_version=(2, 14)))
    grouped = backward("efficient", replace(GROUPED, torch_version=(2, 14)))
    assert grouped.num_bytes - plain.num_bytes == 2 * 4 * 12 * 1024 * 64 * 2


def test_cudnn_is_a_guess():
    scratch = backward("cudnn", replace(CALL, capability=H100))
    assert scratch.certainty is Certainty.GUESS
    assert scratch.num_bytes == 4 * 12 * 1024 * (64 + 1) * 4


@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn"])
def test_nothing_is_taken_for_a_backward_that_will_not_run(backend):
    call = replace(CALL, requires_grad=False)
    assert backward(backend, call).num_bytes == 0


@pytest.mark.parametrize("card", [(5, 2), (6, 1), (7, 0), T4, A100, A10, (8, 7), H100, RTX_5090])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160, 256, 512])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_efficient_backward_has_a_kernel_for_every_card(card, head_dim, dtype):
    call = replace(CALL, capability=card, dtype=dtype, head_dim=head_dim, value_head_dim=head_dim)
    assert backward("efficient", call).num_bytes > 0
