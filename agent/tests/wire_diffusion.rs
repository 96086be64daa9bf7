//! Messages of diffusion stages: frames of vLLM-Omni's own classes, whole and as they are captured, and what is made of
//! hostile ones.

#![allow(
    clippy::unwrap_used,
    clippy::similar_names,
    reason = "a failed unwrap is a failed test; `decoder` and `decoded` are what they are called"
)]

mod support;

use std::{path::Path, sync::LazyLock};

use omnitap::{
    host::identity::{Flavor, Role, Versions},
    wire::{
        assemble::{Content, Decoded, Decoder, FrameResult, FrameType},
        diffusion::{Diffusion, DiffusionAdd, DiffusionMetrics, DiffusionResult, Images, ResultKind},
        frame::Frame,
        message::Message,
    },
};
use proptest::prelude::*;
use rstest::rstest;
use serde::Deserialize;
use support::{PID, bytes, frame};

const ID: &str = "img_gen-0123456789abcdef-1a2b3c4d";
/// What the smallest default of the kernel side keeps of a long frame.
const HEAD: usize = 28 << 10;
const TAIL: usize = 4 << 10;

/// A frame of tests/frames/diffusion.jsonl, whose images are made up.
#[derive(Deserialize)]
struct Case {
    name: String,
    parts: Vec<Part>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Part {
    Hex(String),
    /// So many bytes of an image.
    Image(usize),
}

fn cases() -> Vec<Case> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/frames/diffusion.jsonl");
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Pixels that look like what the decoder searches for.
const LURE: &[u8] =
    b"\xaepeak_memory_mb\xcb@\x8f@\0\0\0\0\0\xa5error\xc0\xb1error_status_code\xc0\xaaerror_type\xc0\
                      \xb3num_inference_steps\x07\xb3payload_sender_info\xc0";

fn payload(name: &str) -> Vec<u8> {
    let case = cases()
        .into_iter()
        .find(|case| case.name == name)
        .unwrap_or_else(|| panic!("no frame {name}"));
    let mut payload = Vec::new();
    for part in &case.parts {
        match part {
            Part::Hex(digits) => payload.extend(bytes(digits)),
            Part::Image(length) => {
                let end = payload.len() + length;
                payload.extend(LURE.repeat(length / LURE.len() + 1));
                payload.truncate(end);
            }
        }
    }
    payload
}

fn decoder(role: Role) -> Decoder {
    let mut decoder = Decoder::new();
    decoder.process_known(PID, role, Flavor::Omni, &Versions::default());
    decoder
}

const STAGE: Role = Role::DiffusionStage {
    stage: Some(1),
    replica: Some(0),
};

fn role(name: &str) -> Role {
    if name.starts_with("request") || ["abort", "call", "shutdown"].contains(&name) {
        Role::ApiServer
    } else {
        STAGE
    }
}

/// The captured ends of a frame.
fn captured(payload: &[u8], head: usize, tail: usize) -> Frame<'_> {
    if payload.len() <= head + tail {
        return frame(payload);
    }
    Frame {
        size: payload.len() as u64,
        tail: &payload[payload.len() - tail..],
        ..frame(&payload[..head])
    }
}

fn said<'b>(decoded: &'b Decoded<'b>) -> &'b Diffusion<'b> {
    match &decoded.content {
        Content::Message {
            message: Message::Diffusion(message),
            ..
        } => message,
        other => panic!("{other:?}"),
    }
}

fn metrics() -> DiffusionMetrics {
    DiffusionMetrics {
        steps: Some(28),
        preprocess_ms: Some(0.0),
        exec_ms: Some(5600.0),
        postprocess_ms: Some(12.5),
        waiting: Some(3),
        ..DiffusionMetrics::default()
    }
}

fn result() -> DiffusionResult<'static> {
    DiffusionResult {
        request_id: ID,
        finished: Some(true),
        kind: Some(ResultKind::Image),
        images: Some(Images {
            count: 1,
            pixels: Some(1 << 20),
        }),
        metrics: Some(metrics()),
        peak_memory_mb: Some(20480.5),
        ..DiffusionResult::default()
    }
}

fn images(count: u32, pixels: u64) -> Images {
    Images {
        count,
        pixels: Some(pixels),
    }
}

/// Frames of which the head and the tail tell everything.
#[rstest]
#[case::text_prompt("request", Diffusion::Add(DiffusionAdd { request_id: ID, size: 0, steps: Some(28) }))]
#[case::default_steps("request with default steps", Diffusion::Add(DiffusionAdd { request_id: ID, size: 0, steps: None }))]
#[case::image_prompt("request to edit", Diffusion::Add(DiffusionAdd { request_id: ID, size: 0, steps: Some(28) }))]
#[case::abort("abort", Diffusion::Abort(vec![ID, "img_gen-2"]))]
#[case::call("call", Diffusion::Call)]
#[case::shutdown("shutdown", Diffusion::Shutdown)]
#[case::one_image("result", Diffusion::Result(DiffusionResult {
    metrics: Some(DiffusionMetrics { queue_wait_ms: Some(1250.0), ..metrics() }),
    ..result()
}))]
#[case::profile("result with profile", Diffusion::Result(DiffusionResult {
    metrics: Some(DiffusionMetrics {
        queue_wait_ms: Some(0.0),
        vae_decode_ms: Some(250.0),
        forward_ms: Some(5040.0),
        kv_recv_ms: Some(40.0),
        ..metrics()
    }),
    ..result()
}))]
#[case::four("four images", Diffusion::Result(DiffusionResult { images: Some(images(4, 4 << 20)), ..result() }))]
#[case::tensor("tensor of images", Diffusion::Result(DiffusionResult { images: Some(images(1, 2 * 512 * 768)), ..result() }))]
#[case::video("video", Diffusion::Result(DiffusionResult {
    kind: Some(ResultKind::Other),
    images: Some(images(1, 8 * 640 * 3)),
    ..result()
}))]
#[case::stream("part of a stream", Diffusion::Result(DiffusionResult { finished: Some(false), ..result() }))]
#[case::custom("with custom output", Diffusion::Result(result()))]
#[case::no_memory("without memory figure", Diffusion::Result(DiffusionResult {
    peak_memory_mb: Some(0.0),
    ..result()
}))]
#[case::started("started", Diffusion::Result(DiffusionResult {
    finished: Some(false),
    is_start: true,
    images: Some(images(0, 0)),
    metrics: Some(DiffusionMetrics::default()),
    peak_memory_mb: Some(0.0),
    ..result()
}))]
#[case::failed("result that is an error", Diffusion::Result(DiffusionResult {
    failed: true,
    kind: Some(ResultKind::Other),
    images: Some(images(0, 0)),
    metrics: Some(DiffusionMetrics::default()),
    peak_memory_mb: Some(0.0),
    ..result()
}))]
#[case::snapshot("metrics", Diffusion::Snapshot { waiting: Some(2) })]
#[case::error("error", Diffusion::Error { request_id: ID, waiting: Some(1) })]
#[case::error_of_a_call("error of a call", Diffusion::Reply)]
#[case::return_of_a_call("return of a call", Diffusion::Reply)]
fn head_and_tail_tell_everything(#[case] name: &str, #[case] mut want: Diffusion<'_>) {
    let payload = payload(name);
    if let Diffusion::Add(add) = &mut want {
        add.size = payload.len() as u64;
    }
    for part in [frame(&payload), captured(&payload, HEAD, TAIL)] {
        let mut decoder = decoder(role(name));
        let decoded = decoder.frame(&part);
        assert_eq!(
            (decoded.kind, decoded.result),
            (FrameType::Diffusion, FrameResult::Decoded)
        );
        assert_eq!(said(&decoded), &want);
    }
}

#[test]
fn images_of_different_sizes_are_added_up_and_cut_ones_taken_for_equal() {
    let payload = payload("three small images");
    let exact = 32 * 32 + 48 * 48 + 64 * 64;
    for (head, pixels) in [
        (payload.len(), exact),
        (9_000, 3 * (32 * 32 + 48 * 48) / 2),
        (2_000, 3 * 32 * 32),
    ] {
        let mut decoder = decoder(STAGE);
        let decoded = decoder.frame(&captured(&payload, head, 1024));
        let want = DiffusionResult {
            images: Some(images(3, pixels)),
            ..result()
        };
        assert_eq!(said(&decoded), &Diffusion::Result(want), "{head}");
    }
}

#[test]
fn behind_a_picture_in_the_prompt_only_the_end_of_a_result_is_seen() {
    let payload = payload("result of an edit");
    let mut decoder = decoder(STAGE);
    let decoded = decoder.frame(&captured(&payload, HEAD, TAIL));
    assert_eq!(decoded.result, FrameResult::Partial);
    let want = DiffusionResult {
        request_id: ID,
        peak_memory_mb: Some(20480.5),
        ..DiffusionResult::default()
    };
    assert_eq!(said(&decoded), &Diffusion::Result(want));
}

/// Whatever is said of a cut frame is what the whole one says.
#[test]
fn a_cut_frame_says_a_part_of_the_truth() {
    for case in cases() {
        let whole = payload(&case.name);
        let mut of_whole = decoder(role(&case.name));
        let truth = of_whole.frame(&frame(&whole));
        let truth = said(&truth);
        let step = if whole.len() > 4000 { 997 } else { 1 };
        for head in (0..whole.len()).step_by(step) {
            for tail in [0, 40, 300, 4096] {
                if head + tail > whole.len() {
                    continue;
                }
                let mut decoder = decoder(role(&case.name));
                let cut = Frame {
                    size: whole.len() as u64,
                    tail: &whole[whole.len() - tail..],
                    ..frame(&whole[..head])
                };
                let decoded = decoder.frame(&cut);
                let Content::Message {
                    message: Message::Diffusion(part),
                    ..
                } = &decoded.content
                else {
                    assert!(head < 100, "{}: {head} bytes are enough: {decoded:?}", case.name);
                    continue;
                };
                assert_part(
                    part,
                    truth,
                    &format!("{} cut to {head} and {tail} bytes", case.name),
                );
            }
        }
    }
}

fn assert_part(part: &Diffusion<'_>, truth: &Diffusion<'_>, place: &str) {
    match (part, truth) {
        (Diffusion::Result(part), Diffusion::Result(truth)) => {
            assert_eq!(part.request_id, truth.request_id, "{place}");
            assert!(
                part.finished.is_none() || part.finished == truth.finished,
                "{place}"
            );
            assert!(!part.is_start || truth.is_start, "{place}");
            assert!(!part.failed || truth.failed, "{place}");
            assert!(part.kind.is_none() || part.kind == truth.kind, "{place}");
            assert!(part.metrics.is_none() || part.metrics == truth.metrics, "{place}");
            assert!(
                part.images
                    .map(|images| images.count)
                    .is_none_or(|count| { truth.images.is_some_and(|images| images.count == count) }),
                "{place}"
            );
            assert!(
                part.peak_memory_mb.is_none() || part.peak_memory_mb == truth.peak_memory_mb,
                "{place}"
            );
        }
        (Diffusion::Add(part), Diffusion::Add(truth)) => {
            assert_eq!(part.request_id, truth.request_id, "{place}");
            assert!(part.steps.is_none() || part.steps == truth.steps, "{place}");
        }
        (Diffusion::Abort(part), Diffusion::Abort(truth)) => assert!(truth.starts_with(part), "{place}"),
        (Diffusion::Snapshot { waiting: part }, Diffusion::Snapshot { waiting: truth })
        | (Diffusion::Error { waiting: part, .. }, Diffusion::Error { waiting: truth, .. }) => {
            assert!(part.is_none() || part == truth, "{place}");
        }
        // An error of a request whose id was cut off.
        (Diffusion::Reply, Diffusion::Error { .. }) => {}
        (part, truth) => assert_eq!(part, truth, "{place}"),
    }
}

#[test]
fn a_redacted_frame_decodes_to_the_same_message_and_shows_nothing() {
    for case in cases() {
        let payload = payload(&case.name);
        for part in [
            frame(&payload),
            captured(&payload, HEAD, TAIL),
            captured(&payload, 700, 300),
        ] {
            let mut decoder = decoder(role(&case.name));
            let before = decoder.frame(&part);
            let (mut head, mut tail) = (part.head.to_vec(), part.tail.to_vec());
            decoder.redact(PID, before.kind, part.size, &mut head, &mut tail);
            let after = decoder.frame(&Frame {
                head: &head,
                tail: &tail,
                ..part
            });
            assert_eq!(after, before, "{}", case.name);
            for secret in [&b"lighthouse"[..], b"night", b"out of memory", b"no such method"] {
                for shown in [&head, &tail] {
                    let found = shown.windows(secret.len()).any(|window| window == secret);
                    assert!(
                        !found,
                        "{} shows {:?}",
                        case.name,
                        String::from_utf8_lossy(secret)
                    );
                }
            }
            // Not even where an image ends in what looks like the end of a result.
            let lure = LURE.get(20..60).unwrap();
            assert!(
                !head.windows(lure.len()).any(|window| window == lure),
                "{}",
                case.name
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn a_damaged_frame_makes_nothing_panic_and_redacts_soundly(
        index in any::<prop::sample::Index>(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 0..8),
        head in 1_usize..1500,
        tail in 1_usize..1500,
        missing in 0_u64..5000,
    ) {
        static PAYLOADS: LazyLock<Vec<Vec<u8>>> =
            LazyLock::new(|| cases().iter().map(|case| payload(&case.name)).collect());
        let payload = index.get(&PAYLOADS);
        let (mut head, mut tail) = (
            payload[..head.min(payload.len())].to_vec(),
            payload[payload.len().saturating_sub(tail)..].to_vec(),
        );
        for (at, value, is_in_tail) in &flips {
            *at.get_mut(if *is_in_tail { &mut tail } else { &mut head }) = *value;
        }
        let size = payload.len() as u64 + missing;
        let cut = Frame { size, tail: &tail, ..frame(&head) };
        for role in [Role::ApiServer, STAGE] {
            let mut decoder = decoder(role);
            let before = decoder.frame(&cut);
            let (mut new_head, mut new_tail) = (head.clone(), tail.clone());
            decoder.redact(PID, before.kind, size, &mut new_head, &mut new_tail);
            let after = decoder.frame(&Frame { head: &new_head, tail: &new_tail, ..cut });
            if matches!(before.content, Content::Message { .. }) {
                prop_assert_eq!(after.content, before.content);
            }
            prop_assert_eq!(decoder.open_messages(), 0);
        }
    }
}
