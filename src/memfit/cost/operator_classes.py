"""What kind of work an operator is: those of a kind reach a similar share of a device's rates."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from enum import StrEnum


class OperatorClass(StrEnum):
    """A kind of work."""

    PRODUCT = "product"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    RECURRENT = "recurrent"
    NORM = "norm"
    """Over the last dimensions: of layers and root mean squares."""
    CHANNEL_NORM = "channel-norm"
    """Over all but the channels: of batches and groups."""
    SOFTMAX = "softmax"
    REDUCTION = "reduction"
    INDEXING = "indexing"
    SORTING = "sorting"
    OPTIMIZER = "optimizer"
    RANDOM = "random"
    COPY = "copy"
    FUNCTION = "function"
    """A function of each element that takes more than an addition."""
    POINTWISE = "pointwise"
    """Everything else, which is mostly arithmetic of each element."""


_NAMES: Mapping[OperatorClass, str] = {
    OperatorClass.PRODUCT: "mm addmm bmm baddbmm mv addmv dot matmul linear _addmm_activation "
    "mkldnn_linear _scaled_mm",
    OperatorClass.SOFTMAX: "_softmax _log_softmax _safe_softmax _softmax_backward_data "
    "_log_softmax_backward_data logsumexp logcumsumexp",
    OperatorClass.REDUCTION: "sum mean amax amin max min argmax argmin prod any all norm var std "
    "var_mean std_mean linalg_vector_norm cumsum cumprod count_nonzero mse_loss avg_pool2d "
    "max_pool2d_with_indices _adaptive_avg_pool2d nll_loss_forward nll_loss2d_forward",
    OperatorClass.INDEXING: "embedding embedding_dense_backward _embedding_bag index index_put "
    "index_put_ _index_put_impl_ _unsafe_index index_select index_add index_add_ index_copy "
    "index_fill gather scatter scatter_ scatter_add scatter_add_ scatter_reduce masked_select "
    "nonzero max_pool2d_with_indices_backward",
    OperatorClass.SORTING: "sort topk argsort msort unique_dim _unique2 kthvalue median",
    OperatorClass.RANDOM: "bernoulli bernoulli_ native_dropout native_dropout_backward rand randn "
    "rand_like randn_like randint randperm uniform_ normal_ random_ multinomial _fused_dropout",
    OperatorClass.COPY: "copy_ _to_copy clone cat stack zeros zero_ zeros_like fill_ full "
    "full_like new_zeros ones ones_like slice_backward select_backward constant_pad_nd repeat "
    "roll flip arange nll_loss_backward nll_loss2d_backward",
    OperatorClass.FUNCTION: "exp log sqrt rsqrt tanh sigmoid gelu gelu_backward silu silu_backward "
    "erf sin cos pow softplus softplus_backward mish elu log_sigmoid_forward where masked_fill "
    "log1p expm1 cosh sinh atan atan2",
}
_STARTS: Mapping[str, OperatorClass] = {
    "_foreach_": OperatorClass.OPTIMIZER,
    "_fused_": OperatorClass.OPTIMIZER,
    "_scaled_dot_product_": OperatorClass.ATTENTION,
    "_flash_attention_": OperatorClass.ATTENTION,
    "_efficient_attention_": OperatorClass.ATTENTION,
    "_cudnn_attention_": OperatorClass.ATTENTION,
    "convolution": OperatorClass.CONVOLUTION,
    "cudnn_convolution": OperatorClass.CONVOLUTION,
    "mkldnn_convolution": OperatorClass.CONVOLUTION,
    "mkldnn_rnn": OperatorClass.RECURRENT,
    "_cudnn_rnn": OperatorClass.RECURRENT,
    "_thnn_fused": OperatorClass.RECURRENT,
    "native_layer_norm": OperatorClass.NORM,
    "native_batch_norm": OperatorClass.CHANNEL_NORM,
    "native_group_norm": OperatorClass.CHANNEL_NORM,
    "cudnn_batch_norm": OperatorClass.CHANNEL_NORM,
    "_native_batch_norm": OperatorClass.CHANNEL_NORM,
    "batch_norm": OperatorClass.CHANNEL_NORM,
    "_fused_rms_norm": OperatorClass.NORM,
}
_BY_NAME = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_LONGEST_FIRST = sorted(_STARTS, key=len, reverse=True)


@functools.cache
def class_of(operator: str) -> OperatorClass:
    """Return the class of an operator, by the name that recorded operations have."""
    name = operator.rpartition("::")[2].partition(".")[0]
    found = _BY_NAME.get(name)
    if found is not None:
        return found
    start = next((start for start in _LONGEST_FIRST if name.startswith(start)), None)
    return OperatorClass.POINTWISE if start is None else _STARTS[start]
