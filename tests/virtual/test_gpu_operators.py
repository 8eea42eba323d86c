"""Operators on a virtual GPU are the ones that CUDA would choose, with what they keep."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from tests.virtual.steps import BOOL, FLOAT, HALF, LONG, on_card, recorded, sizes, training
from torch import nn
from torch.amp import custom_bwd, custom_fwd
from torch.nn.attention import SDPBackend, sdpa_kernel

from memfit.errors import RecordingError
from memfit.trace.events import Category, Phase

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


def one_step(step, device="a100-40gb"):
    return recorded(lambda: step, device, num_steps=1)


def saved(trace, operator) -> list[int]:
    return sizes(trace, operator, Phase.FORWARD, Category.SAVED_ACTIVATIONS)


# --- autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [bf16, fp16])
def test_autocast_runs_products_low_and_the_rest_in_fp32(dtype):
    def step():
        x, labels = on_card(4, 16), on_card(4, dtype=torch.long)
        with torch.autocast("cuda", dtype=dtype):
            low = nn.Linear(16, 32).cuda()(x)
            assert (low.dtype, (low @ low.t()).dtype) == (dtype, dtype)
            assert nn.Conv1d(4, 2, 3).cuda()(low[None]).dtype is dtype
            assert F.scaled_dot_product_attention(*[on_card(1, 1, 8, 8)] * 3).dtype is dtype
            for high in (
                F.layer_norm(low, (32,)),
                torch.softmax(low, -1),
                F.cross_entropy(low, labels),
                F.mse_loss(low, low),
                low.sum(),
                low.exp(),
                torch.cat([low, low.float()]),
            ):
                assert high.dtype is fp32
            assert F.gelu(low).dtype is dtype
            with pytest.raises(RuntimeError, match="unsafe to autocast"):
                F.binary_cross_entropy(low, low)
        assert F.linear(x, x).dtype is fp32

    one_step(step)


def lifetime(trace, num_bytes, operator) -> list[tuple[int, int | None]]:
    """Return when each block of a size was made and freed, as places among the events."""
    born = [
        index
        for index, a in enumerate(trace.allocations)
        if (a.num_bytes, a.operator) == (num_bytes, operator)
    ]
    events = trace.events
    return [(events.index(i), events.index(-1 - i) if -1 - i in events else None) for i in born]


def weight_casts(trainable: bool, enabled: bool = True):
    """Use a weight twice in each of two regions; say where the regions end."""
    weight = nn.Parameter(on_card(8, 8), requires_grad=trainable)
    x = on_card(2, 8)
    for mark in (100, 101):
        with torch.autocast("cuda", dtype=bf16, cache_enabled=enabled):
            x @ weight
            x @ weight
        on_card(mark)


WEIGHT_COPY = 8 * 8 * HALF


def test_a_weight_is_cast_once_per_region_and_its_copy_goes_when_the_region_ends():
    trace = one_step(lambda: weight_casts(trainable=True))
    copies = lifetime(trace, WEIGHT_COPY, "_to_copy")
    ends = [lifetime(trace, mark * FLOAT, "zeros")[0][0] for mark in (100, 101)]
    assert len(copies) == 2
    products = [i for i, e in enumerate(trace.events) if e >= 0 and is_product(trace, e)]
    assert products[1] < copies[0][1] < ends[0] < copies[1][0]
    assert products[3] < copies[1][1] < ends[1]


def is_product(trace, index) -> bool:
    allocation = trace.allocations[index]
    return allocation.operator == "mm" and allocation.category is not Category.WORKSPACES


@pytest.mark.parametrize(("trainable", "enabled"), [(False, True), (True, False)])
def test_frozen_weights_and_regions_without_a_cache_cast_every_time(trainable, enabled):
    trace = one_step(lambda: weight_casts(trainable, enabled))
    copies = lifetime(trace, WEIGHT_COPY, "_to_copy")
    assert len(copies) == 4
    assert copies[0][1] < copies[1][0]


def test_regions_may_be_nested_and_switched_off_and_may_be_decorators():
    def step():
        x, weight = on_card(2, 8), on_card(8, 8)

        @torch.autocast("cuda")
        def decorated():
            return x @ weight

        with torch.autocast("cuda", dtype=bf16):
            assert (x @ weight).dtype is bf16
            with torch.autocast("cuda", enabled=False):
                assert (x @ weight).dtype is fp32
            with torch.autocast("cuda", dtype=fp16):
                assert (x @ weight).dtype is fp16
            with torch.autocast("cpu", dtype=bf16):
                assert (x @ weight).dtype is bf16
            assert (x @ weight).dtype is bf16
            assert (torch.zeros(2, 8) @ torch.zeros(8, 8)).dtype is fp32
        with torch.autocast("cpu", dtype=bf16):
            assert (x @ weight).dtype is fp32
        assert decorated().dtype is fp16
        assert not torch.is_autocast_enabled("cuda")

    one_step(step)


@pytest.mark.filterwarnings("ignore:.*torch.cuda.amp.*:FutureWarning")
def test_the_old_names_of_autocast_and_scaler_work():
    def step():
        with torch.cuda.amp.autocast():
            assert (on_card(2, 8) @ on_card(8, 8)).dtype is fp16
        scaler = torch.cuda.amp.GradScaler()
        assert scaler.is_enabled()
        assert scaler.scale(on_card(3)).is_cuda

    one_step(step)


@pytest.mark.parametrize(("cast", "dtype"), [(None, bf16), (fp32, fp32)])
def test_functions_of_ones_own_see_the_region_that_they_ask_for(cast, dtype):
    class Product(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type="cuda", cast_inputs=cast)
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            out = x @ weight
            assert out.dtype is dtype
            return out

        @staticmethod
        @custom_bwd(device_type="cuda")
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            assert (grad @ weight.t()).dtype is dtype
            return (grad @ weight.t()).float(), (x.t() @ grad).float()

    def step():
        with torch.autocast("cuda", dtype=bf16):
            out = Product.apply(on_card(2, 8), on_card(8, 8, requires_grad=True))
        out.sum().backward()

    one_step(step)


def answers_of_the_cpu() -> tuple:
    torch.manual_seed(1)
    x, layer = torch.randn(2, 4, requires_grad=True), nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=bf16):
        low = layer(x)
        dtypes = (low.dtype, torch.softmax(low, -1).dtype, F.mse_loss(low, x).dtype)
    dropped = F.dropout(torch.ones(64), 0.5)
    return (
        *dtypes,
        layer(x).dtype,
        dropped.tolist(),
        torch.softmax(x, -1, dtype=torch.float64).tolist(),
        F.scaled_dot_product_attention(*[x[None, None]] * 3).tolist(),
        F.rms_norm(x, (4,)).grad_fn is None,
        nn.LSTM(4, 3)(x)[0].tolist(),
        F.one_hot(torch.tensor([1, 2])).tolist(),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_real_operators_and_autocast_of_the_cpu_are_as_before_after_a_recording(fails):
    before = answers_of_the_cpu()

    def step():
        with torch.autocast("cuda", dtype=bf16):
            F.dropout(on_card(3), 0.5)
            if fails:
                raise KeyError("inside")

    with pytest.raises(RecordingError) if fails else nullcontext():
        one_step(step)
    assert answers_of_the_cpu() == before


# --- attention ------------------------------------------------------------------------------------

B, H, L, D = 2, 4, 32, 16
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"
ATTENTION = B * H * L * D
LOG_SUM_EXP = B * H * L * FLOAT


def attention(dtype, *, device="a100-40gb", heads=H, length=L, dim=D, mask=None, **options):
    def setup():
        shapes = [(B, H, length, dim), (B, heads, length, dim), (B, heads, length, dim)]
        inputs = [on_card(*shape, dtype=dtype, requires_grad=True) for shape in shapes]
        given = None if mask is None else mask()

        def step():
            F.scaled_dot_product_attention(*inputs, attn_mask=given, **options).sum().backward()
            for tensor in inputs:
                tensor.grad = None

        return step

    return recorded(setup, device)


def kernels(trace) -> set[str]:
    names = {a.operator for a in trace.allocations if "scaled_dot_product" in a.operator}
    return {name.removesuffix("_backward") for name in names}


def test_flash_attention_keeps_its_output_and_the_log_sum_exp():
    trace = attention(bf16, is_causal=True)
    assert kernels(trace) == {FLASH}
    random_state = [2 * LONG, LONG]
    assert saved(trace, FLASH) == [ATTENTION * HALF, LOG_SUM_EXP, *random_state]
    grads = sizes(trace, f"{FLASH}_backward", Phase.BACKWARD)
    assert grads[-3:] == [ATTENTION * HALF] * 3


def test_flash_attention_pads_heads_to_a_multiple_of_eight():
    trace = attention(bf16, dim=12)
    assert saved(trace, "constant_pad_nd") == [ATTENTION * HALF] * 3
    assert saved(trace, FLASH)[0] == ATTENTION * HALF


def test_attention_in_fp32_or_with_a_mask_takes_the_efficient_kernel():
    trace = attention(fp32)
    assert kernels(trace) == {EFFICIENT}
    assert saved(trace, EFFICIENT)[:2] == [ATTENTION * FLOAT, LOG_SUM_EXP]
    masked = attention(bf16, mask=lambda: on_card(B, 1, L, L, dtype=torch.bool))
    assert kernels(masked) == {EFFICIENT}
    # The bools become numbers, which backward needs.
    assert saved(masked, "where") == [B * L * L * HALF]


def test_rows_of_a_mask_are_padded_to_a_multiple_of_sixteen():
    trace = attention(bf16, length=30, mask=lambda: on_card(30, 30, dtype=bf16))
    assert saved(trace, "constant_pad_nd") == [30 * 32 * HALF]
    assert saved(trace, EFFICIENT)[:2] == [B * H * 30 * D * HALF, LOG_SUM_EXP]


def test_the_efficient_kernel_refuses_a_mask_whose_last_dimension_is_expanded():
    trace = attention(fp32, mask=lambda: on_card(L, 1).expand(L, L))
    assert kernels(trace) == set()


def test_a_card_without_bf16_computes_it_step_by_step_in_fp32():
    trace = attention(bf16, device="t4")
    assert kernels(trace) == set()
    assert saved(trace, "_safe_softmax") == [B * H * L * L * FLOAT]
    assert saved(trace, "mul") == [ATTENTION * FLOAT] * 2
    assert kernels(attention(fp16, device="t4")) == {EFFICIENT}


def test_step_by_step_attention_adds_its_mask_in_place():
    scores = B * H * L * L * FLOAT
    trace = attention(bf16, device="t4", is_causal=True)
    made = [a.num_bytes for a in trace.allocations if a.phase is Phase.FORWARD]
    # The products and their softmax; the sum of product and mask is no third one.
    assert made.count(scores) == 2
    assert sizes(trace, "where") == [L * L * FLOAT]


def test_a_new_card_takes_cudnn_attention():
    assert kernels(attention(bf16, device="h100-80gb")) == {CUDNN}


def test_users_choose_the_kernel_with_sdpa_kernel():
    with sdpa_kernel(SDPBackend.MATH):
        assert kernels(attention(bf16)) == set()
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert kernels(attention(bf16)) == {EFFICIENT}


def test_grouped_queries_keep_fewer_keys_in_flash_and_repeat_them_elsewhere():
    flash = attention(bf16, heads=2, enable_gqa=True)
    assert kernels(flash) == {FLASH}
    assert sizes(flash, f"{FLASH}_backward")[-2:] == [ATTENTION * HALF // 2] * 2
    assert flash.flops() == attention(bf16).flops()
    step_by_step = attention(fp32, heads=2, enable_gqa=True)
    assert kernels(step_by_step) == set()
    assert sizes(step_by_step, "clone", Phase.FORWARD) == [ATTENTION * FLOAT] * 2


def test_attention_without_gradients_keeps_no_log_sum_exp():
    def step():
        with torch.no_grad():
            F.scaled_dot_product_attention(*[on_card(B, H, L, D)] * 3)

    assert sizes(one_step(step), EFFICIENT)[:2] == [ATTENTION * FLOAT, 0]


@pytest.mark.slow
def test_multi_head_attention_adds_its_bias_in_place():
    trace = recorded(training(lambda: SelfAttention(16, 2), 2, 8, 16))
    projected = 2 * 8 * 3 * 16 * FLOAT
    assert sizes(trace, "mm", Phase.FORWARD) == [projected]
    assert sizes(trace, "add", Phase.FORWARD) == []
    assert kernels(trace) == {EFFICIENT}


class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.slow
def test_a_transformer_encoder_keeps_masks_of_bools_for_its_dropouts():
    batch, length, width, hidden = 2, 8, 16, 32
    layer = lambda: nn.TransformerEncoderLayer(width, 2, hidden, batch_first=True)  # noqa: E731
    trace = recorded(training(lambda: nn.TransformerEncoder(layer(), 2), batch, length, width))
    tokens = batch * length
    masks = [tokens * n * BOOL for n in (width, hidden, width)] * 2
    assert [n for n in sizes(trace, "native_dropout") if n in masks] == masks
    normalised = [tokens * width * FLOAT, tokens * FLOAT, tokens * FLOAT] * 4
    assert sizes(trace, "native_layer_norm", Phase.FORWARD) == normalised
    assert trace_modules(trace, EFFICIENT) == {"layers.0.self_attn", "layers.1.self_attn"}


def trace_modules(trace, operator) -> set[str]:
    return {a.module for a in trace.allocations if a.operator == operator}


# --- dropout, softmax, norms ----------------------------------------------------------------------


def test_dropout_keeps_one_byte_per_element():
    def step():
        x = on_card(1000, requires_grad=True)
        F.dropout(x, 0.3).sum().backward()
        F.dropout(x, 0.3, training=False)

    assert sizes(one_step(step), "native_dropout") == [1000 * FLOAT, 1000 * BOOL]


@pytest.mark.parametrize("function", [F.softmax, F.log_softmax])
def test_softmax_reads_fp16_and_writes_fp32_without_a_copy(function):
    def step(dtype):
        return lambda: function(on_card(1000, dtype=dtype), 0, dtype=fp32)

    assert [a.num_bytes for a in one_step(step(fp16)).allocations] == [1000 * HALF, 1000 * FLOAT]
    assert sizes(one_step(step(bf16)), "_to_copy") == [1000 * FLOAT]


def test_rms_norm_is_one_kernel_that_keeps_one_number_per_row():
    trace = recorded(
        training(lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.ReLU()), 5, 8)
    )
    assert sizes(trace, "_fused_rms_norm", Phase.FORWARD) == [5 * 8 * FLOAT, 5 * FLOAT]
    assert saved(trace, "_fused_rms_norm") == [5 * FLOAT]
    grads = sizes(trace, "_fused_rms_norm_backward", Phase.BACKWARD)
    assert grads[:2] == [5 * 8 * FLOAT, 8 * FLOAT]


def test_batch_norm_and_convolutions_keep_their_inputs_and_statistics():
    def model():
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())

    trace = recorded(training(model, 2, 3, 8, 8))
    features = 2 * 4 * 8 * 8 * FLOAT
    assert saved(trace, "convolution") == [features]
    assert saved(trace, "native_batch_norm") == [4 * FLOAT, 4 * FLOAT]
    assert saved(trace, "relu") == [features]
    gradients = [
        a.num_bytes for a in trace.allocations if a.category is Category.GRADIENTS and a.operator
    ]
    assert sorted(gradients) == sorted(n * FLOAT for n in (4 * 3 * 3 * 3, 4, 4, 4))


def test_the_gradient_of_an_embedding_is_as_large_as_its_table():
    trace = recorded(training(lambda: nn.Embedding(50, 8), 3, 4, dtype=torch.long))
    assert sizes(trace, "embedding") == [3 * 4 * 8 * FLOAT]
    assert sizes(trace, "embedding_dense_backward")[0] == 50 * 8 * FLOAT


def test_one_hot_takes_one_tensor():
    trace = one_step(lambda: F.one_hot(on_card(6, dtype=torch.long), 10))
    assert sizes(trace, "zeros") == [6 * LONG, 6 * 10 * LONG]
    assert len(trace.allocations) == 2


# --- recurrent layers -----------------------------------------------------------------------------

N, T, IN, OUT = 2, 5, 8, 16
LAYERS = {
    # The layer, its gates, the widths of its output and of a state, and its states.
    "lstm": (lambda: nn.LSTM(IN, OUT, batch_first=True), 4, (OUT, OUT), 1),
    "two layers": (lambda: nn.LSTM(IN, OUT, 2, batch_first=True, dropout=0.1), 4, (OUT, OUT), 2),
    "gru": (lambda: nn.GRU(IN, OUT, batch_first=True), 3, (OUT, OUT), 1),
    "rnn": (lambda: nn.RNN(IN, OUT, batch_first=True), 1, (OUT, OUT), 1),
    "relu": (lambda: nn.RNN(IN, OUT, batch_first=True, nonlinearity="relu"), 1, (OUT, OUT), 1),
    "no bias": (lambda: nn.GRU(IN, OUT, batch_first=True, bias=False), 3, (OUT, OUT), 1),
    "both ways": (
        lambda: nn.GRU(IN, OUT, batch_first=True, bidirectional=True),
        3,
        (2 * OUT, OUT),
        2,
    ),
    "projected": (lambda: nn.LSTM(IN, OUT, proj_size=4, batch_first=True), 4, (4, 4), 1),
}


@pytest.mark.parametrize(("make", "num_gates", "widths", "num_states"), LAYERS.values(), ids=LAYERS)
def test_a_recurrent_layer_is_one_operator_with_one_buffer_of_gradients(
    make, num_gates, widths, num_states
):
    trace = recorded(training(make, N, T, IN))
    weights = list(make().parameters())
    kept = sizes(trace, "_cudnn_rnn", Phase.FORWARD)
    assert kept[0] == N * T * widths[0] * FLOAT
    assert kept[1] == num_states * N * widths[1] * FLOAT
    gradients = sizes(trace, "_cudnn_rnn_backward", category=Category.GRADIENTS)
    assert gradients == [sum(weight.numel() for weight in weights) * FLOAT]
    # The reserve holds at least the gates of every step.
    assert max(saved(trace, "_cudnn_rnn")[1:]) >= num_states * N * T * num_gates * OUT * FLOAT


def test_autocast_runs_recurrent_layers_in_half_with_their_weights_in_one_buffer():
    weights = 4 * OUT * (IN + OUT + 2)

    def setup():
        layer = nn.LSTM(IN, OUT, batch_first=True).cuda()

        def step():
            with torch.autocast("cuda", torch.bfloat16):
                out = layer(on_card(N, T, IN))[0]
                assert out.dtype == torch.float16
            assert not out.is_contiguous()  # cuDNN writes it time first
            out.sum().backward()
            assert layer.weight_ih_l0.grad.dtype == torch.float32

        return step

    trace = recorded(setup)
    assert 2 * weights in sizes(trace, "zeros", Phase.FORWARD)
    assert 2 * weights in sizes(trace, "_cudnn_rnn_backward", Phase.BACKWARD)


def test_the_first_dropout_of_a_recurrent_layer_makes_a_state_for_good():
    def step():
        for _ in range(2):
            nn.LSTM(IN, OUT, 2, dropout=0.1).cuda()(on_card(T, N, IN))

    kept = [a.num_bytes for a in one_step(step).allocations if a.category is Category.WORKSPACES]
    assert kept.count(108 * 2048 * 24) == 1  # an A100's threads, at 24 bytes each


@pytest.mark.slow
@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_packed_sequences_take_as_many_rows_as_they_are_long(enforce_sorted):
    lengths = [5, 3] if enforce_sorted else [3, 5]

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(IN, OUT)

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(
                x, torch.tensor(lengths), batch_first=True, enforce_sorted=enforce_sorted
            )
            out, found = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            assert out.shape == (N, T, OUT)
            assert found.is_cpu
            if enforce_sorted:  # the order of sorting lies on the card, where values are not known
                assert found.tolist() == lengths
            return out

    trace = recorded(training(Packed, N, T, IN))
    assert sizes(trace, "_pack_padded_sequence") == [8 * IN * FLOAT]
    assert sizes(trace, "_cudnn_rnn", Phase.FORWARD)[0] == 8 * OUT * FLOAT
    assert sizes(trace, "full") == [N * T * OUT * FLOAT]


def test_single_recurrent_steps_are_fused():
    def step():
        lstm, gru = nn.LSTMCell(IN, OUT).cuda(), nn.GRUCell(IN, OUT).cuda()
        hidden, cell = lstm(on_card(N, IN))
        (gru(on_card(N, IN), hidden).sum() + cell.sum()).backward()
        assert gru.weight_ih.grad.shape == (3 * OUT, IN)
        assert lstm.bias_hh.grad.shape == (4 * OUT,)

    trace = one_step(step)
    state = N * OUT * FLOAT
    assert sizes(trace, "_thnn_fused_lstm_cell") == [state, state, 4 * state]
    assert sizes(trace, "_thnn_fused_gru_cell") == [state, 5 * state]
    assert sizes(trace, "sigmoid") == []
