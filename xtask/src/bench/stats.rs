//! Medians, quantiles and confidence intervals of measured samples.

/// A quantile between 0 and 1, by linear interpolation; `NaN` without samples.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "positions in a sample of some thousands"
)]
pub(super) fn quantile(samples: &[f64], q: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = q * sorted.len().saturating_sub(1) as f64;
    let below = sorted.get(at.floor() as usize).copied().unwrap_or(f64::NAN);
    let above = sorted.get(at.ceil() as usize).copied().unwrap_or(f64::NAN);
    below + (above - below) * at.fract()
}

pub(super) fn median(samples: &[f64]) -> f64 {
    quantile(samples, 0.5)
}

/// Smallest and largest sample.
pub(super) fn range(samples: &[f64]) -> (f64, f64) {
    (quantile(samples, 0.0), quantile(samples, 1.0))
}

/// The 95 % interval of `median(a) / median(b)` by the percentile bootstrap. The resampling is seeded: the same
/// samples give the same interval.
pub(super) fn ratio_of_medians(a: &[f64], b: &[f64]) -> (f64, f64) {
    const ROUNDS: usize = 4000;
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let ratios: Vec<f64> = (0..ROUNDS)
        .map(|_| median(&random.resample(a)) / median(&random.resample(b)))
        .collect();
    (quantile(&ratios, 0.025), quantile(&ratios, 0.975))
}

/// splitmix64: enough for resampling.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    fn resample(&mut self, samples: &[f64]) -> Vec<f64> {
        let len = samples.len().max(1) as u64;
        samples
            .iter()
            .filter_map(|_| {
                let at = usize::try_from(self.next() % len).ok()?;
                samples.get(at).copied()
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::odd(&[3.0, 1.0, 2.0], 2.0)]
    #[case::even(&[4.0, 1.0, 2.0, 3.0], 2.5)]
    #[case::one(&[7.0], 7.0)]
    fn medians(#[case] samples: &[f64], #[case] want: f64) {
        assert!((median(samples) - want).abs() < 1e-12);
    }

    #[test]
    fn no_samples_no_median() {
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn the_interval_holds_the_ratio_and_is_narrow_for_many_samples() {
        let a: Vec<f64> = (0..400).map(|i| 102.0 + f64::from(i % 21) / 10.0).collect();
        let b: Vec<f64> = (0..400).map(|i| 100.0 + f64::from(i % 21) / 10.0).collect();
        let (low, high) = ratio_of_medians(&a, &b);
        let ratio = median(&a) / median(&b);
        assert!(low <= ratio && ratio <= high, "{low} {ratio} {high}");
        assert!(high - low < 0.01, "{low} {high}");
        assert!(low > 1.0);
    }
}
