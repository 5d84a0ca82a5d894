"""What the pretend card promises: CUDA's rules, by what each would hide if it were broken."""

import math

import pytest
import torch
import torch.nn.functional as F

MIB = 2**20


def on_card(*shape, dtype=torch.float32):
    return torch.randn(*shape, device="cuda").to(dtype)


def test_it_is_a_card(counter):
    x = on_card(3)
    assert (
        x.is_cuda and str(x.device) == "cuda:0" and torch.cuda.get_device_capability() == (8, 9)
    )
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + torch.randn(3)
    assert (x + torch.tensor(1.0)).is_cuda  # a number


def test_its_numbers_are_the_cpus(counter):
    torch.manual_seed(0)
    x, y = on_card(8, 16), on_card(16, 4)
    assert torch.equal((x @ y).relu().sum(1).cpu(), (x.cpu() @ y.cpu()).relu().sum(1))


def test_launches_are_counted_a_kernel_each_and_views_are_none(counter):
    x = on_card(4, 4)
    counter.reset()
    (x.t()[1:] * 2).add_(1)
    assert counter.counts()["launches"] == 2 and counter.operators() == {
        "aten::mul.Tensor": 1,
        "aten::add_.Tensor": 1,
    }


def test_bytes_are_what_is_read_and_what_is_written(counter):
    x, y = on_card(100), torch.empty(100, device="cuda", dtype=torch.float64)
    counter.reset()
    x + x, x.add_(1), torch.exp(x, out=x), y.copy_(x), y.zero_(), x.sum()
    moved = {
        name.split("::")[1].split(".")[0]: moved
        for name, (_, moved) in counter.traffic().items()
    }
    assert moved == {
        "add": 1200,
        "add_": 800,
        "exp": 800,
        "copy_": 1200,
        "zero_": 800,
        "sum": 404,
    }


@pytest.mark.parametrize(
    ("numbers", "tensors", "launches"),
    # add_ with a number reads and writes one list: 110 tensors a launch, and 320 blocks of 65,536
    [(10, 1, 1), (10, 110, 1), (10, 111, 2), (65536 * 320, 1, 1), (65536 * 320 + 1, 1, 2)],
)
def test_a_list_of_tensors_takes_as_many_launches_as_torch_makes(
    counter, numbers, tensors, launches
):
    made = [torch.zeros(numbers, device="cuda") for _ in range(tensors)]
    counter.reset()
    torch._foreach_add_(made, 1.0)
    assert counter.counts()["launches"] == launches


def test_a_value_read_on_the_host_is_a_wait(counter):
    x = on_card(4)
    counter.reset()
    x.sum().item(), (x > 0).nonzero()  # a number, and a size that only the card knows
    assert counter.counts()["waits"] == 2 and counter.waits() == {
        "_local_scalar_dense": 1,
        "nonzero": 1,
    }


def test_a_copy_into_pinned_memory_is_late(counter):
    x, there = torch.ones(4, device="cuda"), torch.zeros(4).pin_memory()
    there.copy_(x, non_blocking=True)
    assert there.tolist() == [0, 0, 0, 0], "nobody has waited"
    torch.cuda.synchronize()
    assert torch.equal(there, torch.ones(4))


def test_memory_is_counted_capped_and_given_back(counter):
    before = torch.cuda.memory_allocated()
    # no gap that an earlier test left holds it
    x = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 64 * MIB
    counter.put(
        "fraction", (torch.cuda.memory_reserved() + 64 * MIB) / torch.cuda.mem_get_info()[1]
    )
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1.00 GiB"):
        torch.empty(2**30, dtype=torch.uint8, device="cuda")
    del x
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before


def test_freed_memory_is_not_a_number(counter):
    x = torch.ones(2**18, device="cuda")
    at = x.data_ptr()
    del x
    again = torch.empty(2**18, device="cuda")
    assert again.data_ptr() == at and math.isnan(again[0].item())


def captured(work):
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        out = work()
    return graph, out


def test_a_graph_reads_and_writes_the_addresses_of_its_capture(counter):
    x = torch.ones(4, device="cuda")
    graph, y = captured(lambda: x * 2)
    assert y.isnan().all(), "a capture computes nothing"
    x.fill_(3)
    graph.replay()
    assert y.tolist() == [6, 6, 6, 6] and graph.launches() == 1


def test_a_capture_puts_back_what_it_wrote_and_forbids_waits(counter):
    x = torch.zeros(4, device="cuda")
    graph, _ = captured(lambda: x.add_(1))
    assert x.tolist() == [1, 1, 1, 1]  # the warm-up's
    with pytest.raises(Exception, match="capture"):
        captured(lambda: x.sum().item() if torch.cuda.is_current_stream_capturing() else None)
    with pytest.raises(Exception, match="capture"):
        captured(
            lambda: (
                torch.ones(4).to("cuda") if torch.cuda.is_current_stream_capturing() else None
            )
        )


def test_a_graph_that_reads_memory_that_was_given_back_fails(counter):
    held = [torch.ones(2**22, device="cuda")]
    graph, _ = captured(lambda: held[0] * 2)
    held.clear()
    torch.cuda.empty_cache()
    with pytest.raises(torch.AcceleratorError, match="illegal memory access"):
        graph.replay()


def test_a_stream_waits_for_what_it_reads(counter):
    stream, x = torch.cuda.Stream(), torch.ones(4, device="cuda") + 1
    with torch.cuda.stream(stream), pytest.raises(RuntimeError, match="does not wait for it"):
        x * 2
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = x * 2
    with pytest.raises(RuntimeError, match="does not wait for it"):
        y.tolist()
    torch.cuda.current_stream().wait_stream(stream)
    assert y.tolist() == [4, 4, 4, 4]


def test_generators_repeat_and_are_the_cards(counter):
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(2, device="cuda", generator=torch.Generator())
    torch.manual_seed(1)
    state, one = torch.cuda.get_rng_state(), torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), one)


@pytest.mark.parametrize(
    ("dtype", "masked", "kernel"),
    [
        (torch.bfloat16, False, "flash"), (torch.bfloat16, True, "efficient"),
        (torch.float32, False, "efficient"), (torch.float64, False, None),
    ],
)  # fmt: skip
def test_attention_takes_the_kernel_that_cuda_takes(counter, dtype, masked, kernel):
    q = on_card(1, 4, 16, 64, dtype=dtype).requires_grad_()
    mask = torch.ones(16, 16, dtype=torch.bool, device="cuda").tril() if masked else None
    counter.reset()
    out = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    out.sum().backward()
    found = [
        name.split("product_")[1]
        for name in counter.operators()
        if "_scaled_dot_product" in name
    ]
    assert found == ([f"{kernel}_attention", f"{kernel}_attention_backward"] if kernel else [])
    r = q.detach().float().cpu().requires_grad_()
    F.scaled_dot_product_attention(
        r, r, r, attn_mask=None if mask is None else mask.cpu()
    ).sum().backward()
    assert torch.allclose(
        q.grad.float().cpu(), r.grad, atol=1e-6 if dtype == torch.float32 else 0.05
    )
