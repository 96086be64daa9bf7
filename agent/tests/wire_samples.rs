//! Frames seen on the sockets of real servers, decoded through the public functions.

#![allow(
    clippy::unwrap_used,
    clippy::similar_names,
    reason = "a failed unwrap is a failed test; `decoder` and `decoded` are what they are called"
)]

use omnitap::{
    host::identity::{Flavor, Versions},
    wire::{
        engine::{self, Payload},
        layout::Layouts,
        message::{EngineOutputs, FinishReason, Output, OutputKind},
    },
};
use rstest::rstest;

fn bytes(hex: &str) -> Vec<u8> {
    let hex: Vec<u8> = hex.bytes().filter(u8::is_ascii_hexdigit).collect();
    hex.chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

fn layouts(omni: bool, vllm: Option<&str>) -> Layouts {
    let versions = Versions {
        vllm: vllm.map(str::to_owned),
        omni: vllm.filter(|_| omni).map(str::to_owned),
    };
    Layouts::new(if omni { Flavor::Omni } else { Flavor::Vllm }, &versions)
}

const DECODE_TOKEN: &str = "980091dc0016b563686174636d706c2d6162632d3132333461626364912bc0c0c0c0c0c0c0c0c0c0c000c0c0c0\
    c0c0c2c002c0cb408f44cccccccccdc0c0c0c0";
const SYNTHETIC_ABORT: &str =
    "980091dc0011a3722d3190c0c0c002c0c0c0c0c0c0c000c0c0c0c0cb3ff0000000000000c091a3722d31c0c0";

#[rstest]
#[case::by_version(Some("0.30.0"))]
#[case::by_shape(None)]
fn a_decode_token_of_vllm_omni_0_30(#[case] version: Option<&str>) {
    let frame = bytes(DECODE_TOKEN);
    let seen = engine::outputs(Payload::whole(&frame), &layouts(true, version)).unwrap();
    assert!(!seen.is_partial);
    assert_eq!(
        seen.message,
        EngineOutputs {
            outputs: vec![Output {
                request_id: "chatcmpl-abc-1234abcd",
                new_tokens: 1,
                num_generation_tokens: Some(2),
                ..Output::default()
            }],
            timestamp: Some(1000.6),
            ..EngineOutputs::default()
        }
    );
}

#[rstest]
#[case::by_version(Some("0.30.0"))]
#[case::by_shape(None)]
fn a_synthetic_abort_has_the_base_length_inside_omni(#[case] version: Option<&str>) {
    let frame = bytes(SYNTHETIC_ABORT);
    let seen = engine::outputs(Payload::whole(&frame), &layouts(true, version)).unwrap();
    assert_eq!(
        seen.message,
        EngineOutputs {
            outputs: vec![Output {
                request_id: "r-1",
                finish_reason: Some(FinishReason::Abort),
                ..Output::default()
            }],
            timestamp: Some(1.0),
            finished_requests: vec!["r-1"],
            ..EngineOutputs::default()
        }
    );
}

/// A request of vLLM 0.30 (21 elements) with these sampling parameters, as msgpack.
fn request(sampling: &[u8]) -> Vec<u8> {
    let mut frame = vec![0xdc, 0, 21, 0xa1, b'r', 0x92, 1, 2, 0xc0];
    frame.extend_from_slice(sampling);
    frame.extend_from_slice(&[0xc0, 0xcb]);
    frame.extend_from_slice(&7.5_f64.to_be_bytes());
    frame.resize(frame.len() + 15, 0xc0);
    frame
}

#[rstest]
#[case::defaults_are_not_written(b"\x80", OutputKind::Cumulative, false)]
#[case::unknown_keys(b"\x81\xa4seed\x01", OutputKind::Cumulative, false)]
#[case::streamed(b"\x81\xaboutput_kind\x01", OutputKind::Delta, false)]
#[case::final_only(b"\x82\xaboutput_kind\x02\xa4stop\x90", OutputKind::FinalOnly, false)]
#[case::no_stop_strings(b"\x81\xa4stop\xc0", OutputKind::Cumulative, false)]
#[case::one_stop_string(b"\x81\xa4stop\xa3end", OutputKind::Cumulative, true)]
#[case::stop_strings(b"\x81\xa4stop\x92\xa1a\xa1b", OutputKind::Cumulative, true)]
fn sampling_parameters_tell_streams_and_stop_strings(
    #[case] sampling: &[u8],
    #[case] output_kind: OutputKind,
    #[case] has_stop_strings: bool,
) {
    let frame = request(sampling);
    let seen = engine::add(Payload::whole(&frame), &layouts(false, Some("0.30.0"))).unwrap();
    assert!(!seen.is_partial);
    assert_eq!(
        (seen.message.output_kind, seen.message.has_stop_strings),
        (output_kind, has_stop_strings)
    );
    assert_eq!(seen.message.arrival, Some(7.5));
}
