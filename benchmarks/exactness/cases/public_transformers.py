"""Models of the transformers library, from small configurations, with the losses they compute."""

from __future__ import annotations

import torch
import transformers

from exactness.case import Theme
from exactness.parts import NUM_TOKENS, labelled_images, make_job, tokens

theme = Theme("public")

TEXT = {
    "vocab_size": NUM_TOKENS, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 8,
}  # fmt: skip
IMAGE = {
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4,
}  # fmt: skip


def own_loss(model, ids):
    return model(input_ids=ids, labels=ids).loss


@theme.model(
    tokens,
    own_loss,
    8,
    blocks="model.layers",
    source="huggingface/transformers src/transformers/models/llama/modeling_llama.py",
)
def llama():
    """Llama with labels of one length; nothing is ignored."""
    config = transformers.LlamaConfig(
        **TEXT, num_key_value_heads=1, use_cache=False, pad_token_id=0
    )
    return transformers.LlamaForCausalLM(config)


def mixtral(coefficient):
    def model():
        config = transformers.MixtralConfig(
            **TEXT, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
            use_cache=False, output_router_logits=coefficient > 0,
            router_aux_loss_coef=coefficient, pad_token_id=0,
        )  # fmt: skip
        config._experts_implementation = "eager"  # grouped products want fp32
        return transformers.MixtralForCausalLM(config)

    return make_job(model, tokens, own_loss, 8)


@theme.case(
    blocks="model.layers",
    source="huggingface/transformers src/transformers/models/mixtral/modeling_mixtral.py",
)
def mixtral_without_balance():
    """Mixtral: tokens of all samples meet in the experts, each by itself."""
    return mixtral(0.0)


@theme.case(
    adds="no",
    effects=True,
    blocks="model.layers",
    source="huggingface/transformers src/transformers/models/mixtral/modeling_mixtral.py",
)
def mixtral_with_balance():
    """Load balancing over the batch's tokens; the first forward hangs hooks into the model."""
    return mixtral(1e-3)


@theme.case(
    adds="no",
    source="huggingface/transformers src/transformers/models/clip/modeling_clip.py",
)
def clip_model_with_its_loss():
    """CLIPModel with ``return_loss``: in-batch negatives within the model."""

    def model():
        config = transformers.CLIPConfig(
            text_config={**TEXT, "eos_token_id": 2, "projection_dim": 8},
            vision_config={**IMAGE, "projection_dim": 8},
            projection_dim=8,
        )
        return transformers.CLIPModel(config)

    def batch(size):
        return torch.randn(size, 3, 8, 8), tokens(size)

    def loss(model, batch):
        return model(pixel_values=batch[0], input_ids=batch[1], return_loss=True).loss

    return make_job(model, batch, loss, 8)


def vit_mae():
    config = transformers.ViTMAEConfig(
        **IMAGE, decoder_hidden_size=8, decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2, decoder_intermediate_size=16, mask_ratio=0.5,
    )  # fmt: skip
    return transformers.ViTMAEForPreTraining(config)


@theme.loss(
    vit_mae,
    labelled_images,
    8,
    draws="per-sample",
    source="huggingface/transformers src/transformers/models/vit_mae/modeling_vit_mae.py",
)
def vit_masked_autoencoder(model, batch):
    """ViTMAE draws which patches of each image are masked."""
    return model(pixel_values=batch[0]).loss
