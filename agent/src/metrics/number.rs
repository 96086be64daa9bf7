//! Numbers as Python's `prometheus_client` prints them.

use std::io::Write as _;

/// Counts, bytes and nanoseconds as sample values; exact below 2^53.
#[expect(
    clippy::cast_precision_loss,
    reason = "a count above 2^53 may lose its last bits"
)]
pub(crate) fn as_f64(value: u64) -> f64 {
    value as f64
}

/// Appends a sample value: the shortest text that reads back as the same float, laid out as Python's `repr` does,
/// with an exponent from 10^6 on as Go does (`1.0`, `0.05`, `1e-05`, `2.68435456e+08`, `+Inf`, `NaN`).
pub(crate) fn write_float(out: &mut Vec<u8>, value: f64) {
    if (0.0..1e6).contains(&value) && value.fract() == 0.0 && value.is_sign_positive() {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a whole number below 10^6"
        )]
        write_count(out, value as u64);
    } else if value.is_nan() {
        out.extend_from_slice(b"NaN");
    } else if value.is_infinite() {
        out.extend_from_slice(if value > 0.0 { b"+Inf" } else { b"-Inf" });
    } else {
        write_decimal(out, value);
    }
}

/// Appends a count as a sample value.
pub(crate) fn write_count(out: &mut Vec<u8>, count: u64) {
    // Most of what a scrape prints is small counts.
    if count < 1_000_000 {
        out.extend_from_slice(itoa::Buffer::new().format(count).as_bytes());
        out.extend_from_slice(b".0");
    } else {
        #[expect(
            clippy::cast_precision_loss,
            reason = "sample values are floats: exact below 2^53"
        )]
        write_decimal(out, count as f64);
    }
}

/// A float as [`write_float`] prints it.
pub(crate) fn to_string(value: f64) -> String {
    let mut out = Vec::new();
    write_float(&mut out, value);
    String::from_utf8_lossy(&out).into_owned()
}

fn write_decimal(out: &mut Vec<u8>, value: f64) {
    if value.is_sign_negative() {
        out.push(b'-');
    }
    // `{:e}` gives the shortest digits that read back as the same float: `1.25e-7`, at most 23 bytes.
    let mut text = [0_u8; 32];
    let mut free = text.as_mut_slice();
    let _ = write!(free, "{:e}", value.abs());
    let free = free.len();
    let text = text.get_mut(..32 - free).unwrap_or_default();
    let Some(e) = text.iter().position(|b| *b == b'e') else {
        return;
    };
    let (mantissa, exponent) = text.split_at_mut(e);
    let exponent: i32 = exponent
        .get(1..)
        .and_then(|t| std::str::from_utf8(t).ok())
        .and_then(|t| t.parse().ok())
        .unwrap_or(0);
    // Close the gap that the point leaves after the first digit.
    let digits = if mantissa.len() > 2 {
        mantissa.swap(0, 1);
        mantissa.get(1..)
    } else {
        mantissa.get(..1)
    };
    write_digits(out, digits.unwrap_or_default(), exponent, value > 0.0);
}

/// Lays out `digits` (at least one) of which the first counts 10^`exponent`.
fn write_digits(out: &mut Vec<u8>, digits: &[u8], exponent: i32, positive: bool) {
    // Python's repr turns to an exponent below 10^-4 and from 10^16 on; Go's, for positive values, from 10^6 on.
    let limit = if positive { 6 } else { 16 };
    if !(-4..limit).contains(&exponent) {
        let (first, rest) = digits.split_at(digits.len().min(1));
        out.extend_from_slice(first);
        if !rest.is_empty() {
            out.push(b'.');
            out.extend_from_slice(rest);
        }
        let sign = if exponent < 0 { '-' } else { '+' };
        let _ = write!(out, "e{sign}{:02}", exponent.unsigned_abs());
    } else if exponent < 0 {
        out.extend_from_slice(b"0.");
        out.extend((1..-exponent).map(|_| b'0'));
        out.extend_from_slice(digits);
    } else {
        let whole = usize::try_from(exponent).unwrap_or(0) + 1;
        let (before, after) = digits.split_at(whole.min(digits.len()));
        out.extend_from_slice(before);
        out.extend((before.len()..whole).map(|_| b'0'));
        out.push(b'.');
        out.extend_from_slice(if after.is_empty() { b"0" } else { after });
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    // Expected texts are those of Python: prometheus_client.utils.floatToGoString.
    #[rstest]
    #[case::zero(0.0, "0.0")]
    #[case::negative_zero(-0.0, "-0.0")]
    #[case::one(1.0, "1.0")]
    #[case::half(0.5, "0.5")]
    #[case::tenth(0.1, "0.1")]
    #[case::sum_with_noise(0.1 + 0.2, "0.30000000000000004")]
    #[case::smallest_plain(0.0001, "0.0001")]
    #[case::small(0.000_01, "1e-05")]
    #[case::small_with_digits(0.000_012_5, "1.25e-05")]
    #[case::three_digit_exponent(1e-100, "1e-100")]
    #[case::subnormal(5e-324, "5e-324")]
    #[case::largest_plain(999_999.0, "999999.0")]
    #[case::largest_plain_fraction(999_999.5, "999999.5")]
    #[case::million(1e6, "1e+06")]
    #[case::million_and(1_234_567.0, "1.234567e+06")]
    #[case::million_with_fraction(1_234_567.25, "1.23456725e+06")]
    #[case::bucket(268_435_456.0, "2.68435456e+08")]
    #[case::epoch(1_790_000_000.5, "1.7900000005e+09")]
    #[case::eleven_digits(12_345_678_901.0, "1.2345678901e+10")]
    #[case::ends_in_zeros(1_200_000.0, "1.2e+06")]
    #[case::exponent_in_python_too(1e16, "1e+16")]
    #[case::huge(1.5e300, "1.5e+300")]
    #[case::negative(-12.5, "-12.5")]
    #[case::negative_large(-1_234_567.0, "-1234567.0")]
    #[case::negative_huge(-1e16, "-1e+16")]
    #[case::infinite(f64::INFINITY, "+Inf")]
    #[case::negative_infinite(f64::NEG_INFINITY, "-Inf")]
    #[case::nan(f64::NAN, "NaN")]
    fn floats_print_as_in_python(#[case] value: f64, #[case] text: &str) {
        assert_eq!(to_string(value), text);
    }

    #[rstest]
    #[case(0, "0.0")]
    #[case(999_999, "999999.0")]
    #[case(1_000_000, "1e+06")]
    #[case(u64::MAX, "1.8446744073709552e+19")]
    fn counts_print_as_floats(#[case] count: u64, #[case] text: &str) {
        let mut out = Vec::new();
        write_count(&mut out, count);
        assert_eq!(String::from_utf8_lossy(&out), text);
    }

    proptest! {
        #[test]
        fn every_float_reads_back(bits: u64) {
            let value = f64::from_bits(bits);
            prop_assume!(value.is_finite());
            let text = to_string(value);
            prop_assert_eq!(text.parse::<f64>().map(f64::to_bits), Ok(bits));
        }
    }
}
