"""Mistakes in block formats, and in reading and writing them."""

QUANTIZE = "unit/weights/test_quantize.py"
FOLDERS = "unit/checkpoint/test_quantised.py"
MODELS = "unit/checkpoint/test_quantised_models.py"

FORMATS = [
    (
        "weights/encode/quantize.py",
        ".narrow(dim, first, count)",
        ".narrow(dim, 0, count)",
        f"{QUANTIZE}::test_slice_equals_slice_of_whole[fp8_block]",
    ),
    (
        "weights/encode/quantize.py",
        "0.75 - 2**-24",
        "0.75",
        f"{QUANTIZE}::test_equal_to_compressed_tensors[mxfp4_pack]",
    ),
    (
        "weights/encode/quantize.py",
        "quotient.signbit()",
        "(quotient < 0)",
        f"{QUANTIZE}::test_edges[mxfp4_pack]",
    ),
    (
        "weights/encode/quantize.py",
        "amax.view(torch.int32) + (1 << 21)",
        "amax.view(torch.int32) + (0 << 21)",
        f"{QUANTIZE}::test_equal_to_compressed_tensors[mxfp4_pack]",
    ),
    (
        "weights/encode/quantize.py",
        "(7 if fmt.element",
        "(7.5 if fmt.element",
        f"{QUANTIZE}::test_second_rounding_changes_nothing[dtype0-int4_group]",
    ),
    (
        "weights/encode/quantize.py",
        "start = (rows.start % high if high else 0",
        "start = (0",
        f"{FOLDERS}::test_slices[fp8_block-dtype0]",
    ),
    (
        "models/formats.py",
        "return (*sizes[: dims - 2], *sizes[dims - 1 :], sizes[dims - 2])",
        "return sizes",
        f"{MODELS}::test_every_rank_has_its_slices[gpt_oss-mxfp4]",
    ),
    (
        "checkpoint/convert.py",
        "if rounded is not flat:",
        "if False:",
        f"{MODELS}::test_converted_to_megatron_and_back[deepseek_v3-fp8]",
    ),
]
