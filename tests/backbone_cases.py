"""A tiny instance of many keras-nlp backbones: text, vision and audio."""

from __future__ import annotations

import keras_nlp
import numpy as np
from layer_cases import NO_HALF, Case, Skipped, ids, images, numbers

MASK = np.array([[1] * 5, [1, 1, 1, 0, 0]], dtype="int32")
PHOTO = images(1, 32, 32, 3) / 255

TEXT = {"vocabulary_size": 12, "hidden_dim": 8, "intermediate_dim": 12}
GROUPED = TEXT | {"num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 1}
PLAIN = TEXT | {"num_layers": 1, "num_heads": 2}


def tokens(below=12):
    return {"token_ids": ids(2, 5, below=below), "padding_mask": MASK}


def tokens_and_segments(below=12):
    return tokens(below) | {"segment_ids": ids(2, 5, below=2)}


def encoder_and_decoder():
    return {
        "encoder_token_ids": ids(2, 5, below=12),
        "encoder_padding_mask": MASK,
        "decoder_token_ids": ids(2, 4, below=12),
        "decoder_padding_mask": MASK[:, :4],
    }


def without(inputs, key):
    return {name: value for name, value in inputs.items() if name != key}


def case(name, inputs, arguments, **expected):
    """`inputs` are what the backbone is called on, `arguments` what it is made with."""
    return Case(lambda: getattr(keras_nlp.models, name)(**arguments), inputs, **expected)


def mobilenet():
    return {
        "stackwise_expansion": [[8]],
        "stackwise_num_blocks": [1],
        "stackwise_num_filters": [[8]],
        "stackwise_kernel_size": [[3]],
        "stackwise_num_strides": [[2]],
        "stackwise_se_ratio": [[0.25]],
        "stackwise_activation": [["hard_swish"]],
        "stackwise_padding": [[1]],
        "output_num_filters": 8,
        "depthwise_filters": 8,
        "depthwise_stride": 2,
        "depthwise_residual": False,
        "last_layer_filter": 8,
        "input_num_filters": 8,
        "image_shape": (32, 32, 3),
    }


# What some of them need.
SOFTMAX = "the softmax that its author built in float32"
CONSTANT = "has a constant in"
SEQUENTIAL = "the input dtype that a Sequential took from its first layer"

BACKBONES = {
    # Text.
    "AlbertBackbone": case(
        "AlbertBackbone", tokens_and_segments(), PLAIN | {"embedding_dim": 4, "dropout": 0.1}
    ),
    "BartBackbone": case("BartBackbone", encoder_and_decoder(), PLAIN),
    "BertBackbone": case("BertBackbone", tokens_and_segments(), PLAIN),
    "BloomBackbone": case("BloomBackbone", tokens(), PLAIN, handled=SOFTMAX),
    "DebertaV3Backbone": case(
        "DebertaV3Backbone", tokens(), PLAIN | {"bucket_size": 2}, handled=SOFTMAX
    ),
    "DistilBertBackbone": case("DistilBertBackbone", tokens(), PLAIN),
    "ElectraBackbone": case(
        "ElectraBackbone",
        tokens_and_segments(),
        {"vocab_size": 12, "embedding_dim": 4} | without(PLAIN, "vocabulary_size"),
    ),
    "ESMBackbone": case("ESMBackbone", without(tokens(), "padding_mask"), PLAIN),
    "FNetBackbone": case(
        "FNetBackbone", without(tokens_and_segments(), "padding_mask"), without(PLAIN, "num_heads")
    ),
    "FalconBackbone": case(
        "FalconBackbone",
        tokens(),
        TEXT | {"num_layers": 1, "num_attention_heads": 2},
        handled=SOFTMAX,
    ),
    "GPT2Backbone": case("GPT2Backbone", tokens(), PLAIN | {"max_sequence_length": 5}),
    "GPTNeoXBackbone": case(
        "GPTNeoXBackbone", tokens(), PLAIN | {"rotary_percentage": 0.5}, handled=SOFTMAX
    ),
    "GemmaBackbone": case(
        "GemmaBackbone",
        tokens(),
        GROUPED | {"head_dim": 4, "attention_logit_soft_cap": 5.0},
        refused=CONSTANT,
    ),
    "Gemma3Backbone": case(
        "Gemma3Backbone", tokens(), GROUPED | {"head_dim": 4, "image_size": 16}, refused=CONSTANT
    ),
    "GptOssBackbone": case("GptOssBackbone", tokens(), GROUPED | {"num_experts": 2}),
    "LlamaBackbone": case("LlamaBackbone", tokens(), GROUPED, handled=SOFTMAX),
    "MistralBackbone": case("MistralBackbone", tokens(), GROUPED, handled=SOFTMAX),
    "MixtralBackbone": case(
        "MixtralBackbone", tokens(), GROUPED | {"num_experts": 2}, handled=SOFTMAX, fails_in=NO_HALF
    ),
    "OPTBackbone": case("OPTBackbone", tokens(), PLAIN),
    "Phi3Backbone": case("Phi3Backbone", tokens(), GROUPED, handled=SOFTMAX),
    "QwenBackbone": case("Qwen2Backbone", tokens(), GROUPED, handled=SOFTMAX),
    "Qwen3Backbone": case("Qwen3Backbone", tokens(), GROUPED | {"head_dim": 4}, handled=SOFTMAX),
    "QwenMoeBackbone": case(
        "QwenMoeBackbone",
        tokens(),
        GROUPED
        | {
            "num_experts": 2,
            "top_k": 1,
            "moe_intermediate_dim": 8,
            "shared_expert_intermediate_dim": 8,
        },
        handled=SOFTMAX,
        fails_in=NO_HALF,
    ),
    "RWKV7Backbone": case(
        "RWKV7Backbone",
        {"token_ids": ids(1, 16, below=12), "padding_mask": np.ones((1, 16), "int32")},
        {
            "vocabulary_size": 12,
            "hidden_size": 8,
            "head_size": 4,
            "num_layers": 1,
            "intermediate_dim": 8,
            "gate_lora": 4,
            "mv_lora": 4,
            "aaa_lora": 4,
            "decay_lora": 4,
        },
    ),
    "RobertaBackbone": case("RobertaBackbone", tokens(), PLAIN),
    "RoformerV2Backbone": case(
        "RoformerV2Backbone",
        without(tokens_and_segments(), "padding_mask"),
        PLAIN | {"head_size": 4},
    ),
    "SmolLM3Backbone": case(
        "SmolLM3Backbone",
        tokens(),
        TEXT
        | {
            "num_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_layer_enabled_list": [True],
            "layer_types": ["attention"],
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 8,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
        },
        handled=SOFTMAX,
    ),
    "T5Backbone": case("T5Backbone", encoder_and_decoder(), PLAIN),
    "T5GemmaBackbone": case(
        "T5GemmaBackbone",
        encoder_and_decoder(),
        {"vocabulary_size": 12, "query_pre_attn_scalar": 4.0}
        | {
            f"{part}_{name}": value
            for part in ("encoder", "decoder")
            for name, value in {
                "hidden_dim": 8,
                "intermediate_dim": 12,
                "num_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 4,
                "layer_types": ["full_attention"],
            }.items()
        },
        refused=CONSTANT,
    ),
    "XLNetBackbone": case("XLNetBackbone", tokens_and_segments(), PLAIN),
    # Vision.
    "CLIPVisionEncoder": case(
        "CLIPVisionEncoder",
        {"images": PHOTO},
        {
            "patch_size": 16,
            "hidden_dim": 8,
            "num_layers": 1,
            "num_heads": 2,
            "intermediate_dim": 8,
            "image_shape": (32, 32, 3),
        },
    ),
    "CSPNetBackbone": case(
        "CSPNetBackbone",
        PHOTO,
        {
            "stem_filters": 4,
            "stem_kernel_size": 3,
            "stem_strides": 2,
            "stackwise_depth": [1, 1],
            "stackwise_strides": [1, 2],
            "stackwise_num_filters": [4, 8],
            "block_type": "dark_block",
            "stage_type": "csp",
            "block_ratio": [0.5],
            "image_shape": (32, 32, 3),
        },
    ),
    "DeiTBackbone": case(
        "DeiTBackbone",
        PHOTO,
        {
            "image_shape": (32, 32, 3),
            "patch_size": 16,
            "num_layers": 1,
            "num_heads": 2,
            "hidden_dim": 8,
            "intermediate_dim": 8,
            "dropout_rate": 0.1,
        },
    ),
    "DenseNetBackbone": case(
        "DenseNetBackbone",
        PHOTO,
        {"stackwise_num_repeats": [1, 1], "growth_rate": 2, "image_shape": (32, 32, 3)},
    ),
    "DINOV2Backbone": case(
        "DINOV2Backbone",
        {"images": PHOTO},
        {
            "patch_size": 8,
            "num_layers": 1,
            "hidden_dim": 8,
            "num_heads": 2,
            "intermediate_dim": 8,
            "image_shape": (32, 32, 3),
            "position_embedding_shape": (24, 24, 3),
        },
    ),
    "EfficientNetBackbone": case(
        "EfficientNetBackbone",
        PHOTO,
        {
            "stackwise_width_coefficients": [1.0, 1.0],
            "stackwise_depth_coefficients": [1.0, 1.0],
            "stackwise_kernel_sizes": [3, 3],
            "stackwise_num_repeats": [1, 1],
            "stackwise_input_filters": [8, 8],
            "stackwise_output_filters": [8, 8],
            "stackwise_expansion_ratios": [1, 2],
            "stackwise_squeeze_and_excite_ratios": [0.25, 0.25],
            "stackwise_strides": [1, 2],
            "stackwise_block_types": ["fused", "unfused"],
            "stackwise_force_input_filters": [0, 0],
            "stackwise_nores_option": [False, False],
            "num_features": 8,
            "input_shape": (32, 32, 3),
        },
    ),
    "MiTBackbone": case(
        "MiTBackbone",
        PHOTO,
        {
            "layerwise_depths": [1, 1],
            "num_layers": 2,
            "layerwise_num_heads": [1, 2],
            "layerwise_sr_ratios": [2, 1],
            "max_drop_path_rate": 0.1,
            "layerwise_patch_sizes": [7, 3],
            "layerwise_strides": [4, 2],
            "hidden_dims": [4, 8],
            "image_shape": (32, 32, 3),
        },
    ),
    "MobileNetBackbone": case("MobileNetBackbone", PHOTO, mobilenet()),
    "ResNetBackbone": case(
        "ResNetBackbone",
        PHOTO,
        {
            "input_conv_filters": [4],
            "input_conv_kernel_sizes": [7],
            "stackwise_num_filters": [64],
            "stackwise_num_blocks": [1],
            "stackwise_num_strides": [2],
            "block_type": "bottleneck_block",
            "image_shape": (32, 32, 3),
        },
    ),
    "SwinTransformerBackbone": case(
        "SwinTransformerBackbone",
        PHOTO,
        {
            "image_shape": (32, 32, 3),
            "embed_dim": 4,
            "depths": [2],
            "num_heads": [2],
            "window_size": 4,
        },
    ),
    "VGGBackbone": case(
        "VGGBackbone",
        PHOTO,
        {
            "stackwise_num_repeats": [1, 1],
            "stackwise_num_filters": [4, 8],
            "image_shape": (32, 32, 3),
        },
    ),
    "ViTBackbone": case(
        "ViTBackbone",
        PHOTO,
        {
            "image_shape": (32, 32, 3),
            "patch_size": 16,
            "num_layers": 1,
            "num_heads": 2,
            "hidden_dim": 8,
            "mlp_dim": 8,
            "dropout_rate": 0.1,
        },
    ),
    "ViTDetBackbone": case(
        "ViTDetBackbone",
        PHOTO,
        {
            "hidden_size": 8,
            "num_layers": 1,
            "intermediate_dim": 8,
            "num_heads": 2,
            "global_attention_layer_indices": [0],
            "patch_size": 16,
            "num_output_channels": 4,
            "window_size": 2,
            "image_shape": (32, 32, 3),
        },
        handled=SEQUENTIAL,
    ),
    "XceptionBackbone": case(
        "XceptionBackbone",
        PHOTO,
        {
            "stackwise_conv_filters": [[4, 8], [8, 8]],
            "stackwise_pooling": [True, False],
            "image_shape": (32, 32, 3),
        },
    ),
    # Audio.
    "MoonshineBackbone": Skipped(
        "keras-nlp's own builds some of its layers in float32 whatever the policy, and then adds "
        "float32 to half: it computes nothing in a mixed policy"
    ),
    "WhisperBackbone": case(
        "WhisperBackbone",
        {
            "encoder_features": numbers(2, 8, 4),
            "decoder_token_ids": ids(2, 4, below=12),
            "decoder_padding_mask": MASK[:, :4],
        },
        PLAIN | {"num_mels": 4, "max_encoder_sequence_length": 8, "max_decoder_sequence_length": 4},
    ),
}
