"""Work that is spread over the cores: results in order, one thread of BLAS each, errors at once."""

from __future__ import annotations

import threading

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from moegeom.engine.plan import on_all_cores


def _blas_threads() -> list[int]:
    return [one["num_threads"] for one in threadpool_info() if one["user_api"] == "blas"]


def test_results_come_in_the_order_of_the_items_whichever_is_done_first() -> None:
    second_is_done = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            assert second_is_done.wait(60)
        else:
            second_is_done.set()
        return number

    assert list(on_all_cores(work, range(8), 2)) == list(range(8))


def test_each_piece_of_work_has_one_thread_of_blas() -> None:
    with threadpool_limits(2, user_api="blas"):
        found = list(on_all_cores(lambda _: _blas_threads(), range(2), 2))
    assert found[0]
    assert all(threads == 1 for one in found for threads in one)


def test_an_error_is_told_and_what_has_not_begun_is_left_out() -> None:
    begun, never = [], threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise ValueError("the first")
        never.wait(0.05)  # time for the error to arrive

    with pytest.raises(ValueError, match="the first"):
        list(on_all_cores(work, range(100), 1))
    assert len(begun) < 100
