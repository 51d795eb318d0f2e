import pytest

from dtrain.tracking.peak_flops import PEAKS, peak_flops


@pytest.mark.parametrize(
    ("device", "precision", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "fp16", 756.4),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "fp32", 66.9),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA A10G", "bf16", 70.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-PCIE-16GB", "fp32", 14.0),
        ("Tesla V100S-PCIE-32GB", "fp16", 130.0),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_a_device_is_known_by_the_name_that_torch_gives_it(device, precision, tflops):
    assert peak_flops(device, precision) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("Tesla V100-SXM2-16GB", "bf16"),  # no such units
        ("Tesla V100-SXM2-16GB", "tf32"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "fp16"),  # another device
        ("NVIDIA A1000", "bf16"),
        ("cpu", "fp32"),
    ],
)
def test_nothing_is_made_up_for_others(device, precision):
    assert peak_flops(device, precision) is None


def test_the_figures_are_dense_and_in_order():
    for parts, peak in PEAKS:
        assert peak.half >= (peak.tf32 or 0), parts
        assert (peak.tf32 or peak.fp32) >= peak.fp32 * 0.99, parts
