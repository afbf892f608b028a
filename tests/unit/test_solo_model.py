from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windrow.errors import UserError
from windrow_sidecar.qos.solo import SoloSample, SoloStepModel, fit_solo, solo_models


def measured(
    model: SoloStepModel, units: int, noise: float, rng: random.Random
) -> list[SoloSample]:
    return [
        SoloSample(
            units, b, b * length, model.predict_us(b, b * length) * (1 + rng.gauss(0, noise))
        )
        for b in (1, 4, 8, 16)
        for length in (128, 512, 2048)
        for _ in range(20)
    ]


def test_coefficients_are_found_again_for_each_number_of_units():
    truth = {1: SoloStepModel(1800, 420, 0.55), 2: SoloStepModel(1500, 230, 0.31)}
    rng = random.Random(7)
    fits = fit_solo([s for u, m in truth.items() for s in measured(m, u, 0.03, rng)])
    assert sorted(fits) == [1, 2]
    for units, model in truth.items():
        for batch, context in ((2, 500), (6, 7000), (16, 30000)):
            expected = model.predict_us(batch, context)
            # Three coefficients of 240 samples with 3% of noise: 3% x sqrt(3 / 240), five times.
            assert fits[units].model.predict_us(batch, context) == pytest.approx(
                expected, rel=5 * 0.0034
            )
        # The median of |noise| is 0.6745 of its deviation; it is itself known to 0.15.
        assert fits[units].median_abs_error_percent == pytest.approx(0.6745 * 3, abs=5 * 0.15)
        assert fits[units].samples == 240


def test_one_disturbed_step_in_ten_does_not_bend_the_line():
    truth, rng = SoloStepModel(1800, 420, 0.55), random.Random(3)
    samples = [
        SoloSample(s.units, s.batch, s.context_tokens, s.step_us * (9 if i % 10 == 0 else 1))
        for i, s in enumerate(measured(truth, 1, 0.02, rng))
    ]
    fitted = fit_solo(samples)[1].model
    # A tenth of the samples pull like an error of 10%; 2% x sqrt(3 / 240) is noise.
    expected = truth.predict_us(6, 7000)
    assert fitted.predict_us(6, 7000) == pytest.approx(expected, rel=0.1 / 9 + 5 * 0.0022)


def test_batches_up_to_four_are_fitted_and_predicted_as_four():
    model = SoloStepModel(1000, 100, 0.5)
    assert model.predict_us(1, 10) == model.predict_us(4, 10)
    assert model.predict_us(5, 10) == model.predict_us(4, 10) + 100


def test_an_effect_that_is_not_there_becomes_zero_and_never_negative():
    shrinking = [SoloSample(1, b, x, 5000 - 20 * b) for b in (4, 8, 16) for x in (100, 1000)]
    model = fit_solo(shrinking)[1].model
    assert min(model.c0_us, model.b0_us, model.k0_us) == 0
    # The constant with the least squares of the relative error.
    least = sum(1 / s.step_us for s in shrinking) / sum(1 / s.step_us**2 for s in shrinking)
    assert model.predict_us(8, 500) == pytest.approx(least)


def test_a_single_sample_is_enough_for_a_constant():
    assert fit_solo([SoloSample(2, 4, 100, 3000.0)])[2].model.predict_us(4, 100) == pytest.approx(
        3000
    )


@pytest.mark.parametrize(
    ("samples", "problem"),
    [([], "no samples"), ([SoloSample(1, 4, 10, 0.0)], "0.0 us")],
)
def test_what_cannot_be_fitted_is_refused_by_name(samples, problem):
    with pytest.raises(UserError, match=problem):
        fit_solo(samples)


def test_a_profile_is_read_with_its_units():
    profile = {"solo": [{"units": 2, "c0Us": 1500.0, "b0Us": 230.0, "k0NsPerToken": 310.0}]}
    assert solo_models(profile) == {2: SoloStepModel(1500.0, 230.0, 0.31)}


@given(
    st.lists(
        st.tuples(st.integers(1, 64), st.integers(0, 100_000), st.floats(1, 1e6)),
        min_size=1,
        max_size=20,
    )
)
def test_a_fit_of_anything_is_finite_and_not_negative(rows):
    model = fit_solo([SoloSample(1, b, x, y) for b, x, y in rows])[1].model
    assert all(0 <= v < 1e12 for v in (model.c0_us, model.b0_us, model.k0_us))
