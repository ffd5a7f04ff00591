import numpy as np

from megatron_bapo.rollout.messages import Completion, Generated


def test_an_output_with_its_own_arrays_keeps_no_view_of_other_memory() -> None:
    whole = np.arange(100, dtype=np.int32)
    given = Completion(whole[:4], whole[:4].astype(np.float32)[:], "stop", "text", routes=whole[:8].reshape(4, 2, 1))
    (own,) = Generated(3, (given,)).with_own_arrays().completions
    for array in (own.token_ids, own.log_probs, own.routes):
        assert array is not None
        assert array.flags.owndata
    assert (own.token_ids.tolist(), own.finish_reason, own.context_log_probs) == ([0, 1, 2, 3], "stop", None)
    assert own.routes is not None
    assert own.routes.shape == (4, 2, 1)
