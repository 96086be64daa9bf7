//! Parts to messages: envelopes, aux parts, noise, and what a lost frame costs.

#![allow(
    clippy::unwrap_used,
    clippy::similar_names,
    reason = "a failed unwrap is a failed test; `decoder` and `decoded` are what they are called"
)]

mod support;

use omnitap::{
    host::identity::{Flavor, Role, Versions},
    wire::{
        assemble::{Content, Decoder, FrameResult, FrameType},
        frame::Frame,
        message::Message,
    },
};
use rstest::rstest;
use support::{Case, PID, cases, frame};

fn case(name: &str) -> Case {
    cases().into_iter().find(|case| case.name == name).unwrap()
}

fn decoder(role: Role) -> Decoder {
    let version = Some("0.30.0".to_owned());
    let versions = Versions {
        vllm: version.clone(),
        omni: version,
    };
    let mut decoder = Decoder::new();
    decoder.process_known(PID, role, Flavor::Omni, &versions);
    decoder
}

const STAGE: Role = Role::LlmStage {
    stage: Some(1),
    replica: Some(0),
};

fn more(bytes: &[u8]) -> Frame<'_> {
    Frame {
        more: true,
        ..frame(bytes)
    }
}

fn label(decoder: &mut Decoder, part: &Frame<'_>) -> (FrameType, FrameResult) {
    let decoded = decoder.frame(part);
    (decoded.kind, decoded.result)
}

#[rstest]
#[case::engine_dead(STAGE, b"ENGINE_CORE_DEAD", FrameType::EngineDead, FrameResult::Decoded)]
#[case::hello(
    STAGE,
    b"\x83\xa6status\xa5HELLO\xa5local\xc3\xa8headless\xc2",
    FrameType::Handshake,
    FrameResult::Decoded
)]
#[case::replica_event(
    STAGE,
    br#"{"input_addr":"tcp://a:1"}"#,
    FrameType::Coordinator,
    FrameResult::Ignored
)]
#[case::diffusion_dead(STAGE, b"DIFFUSION_PROC_DEAD", FrameType::EngineDead, FrameResult::Decoded)]
#[case::diffusion_result_of_nobody(
    STAGE,
    b"\x82\xa4type\xa6result\xa6output\x80",
    FrameType::Diffusion,
    FrameResult::Malformed
)]
#[case::diffusion_news_of_the_future(
    STAGE,
    b"\x81\xa4type\xa4news",
    FrameType::Diffusion,
    FrameResult::Ignored
)]
#[case::diffusion_request(
    Role::ApiServer,
    b"\x82\xa4type\xa5abort\xabrequest_ids\x90",
    FrameType::Diffusion,
    FrameResult::Decoded
)]
#[case::wake_up(STAGE, b"\x00", FrameType::Signal, FrameResult::Ignored)]
#[case::subscription(Role::ApiServer, b"\x01", FrameType::Signal, FrameResult::Ignored)]
#[case::first_request(
    Role::ApiServer,
    b"\x92\xa9FIRST_REQ\xc4\x02\x00\x00",
    FrameType::Coordinator,
    FrameResult::Ignored
)]
#[case::pickle(
    STAGE,
    b"\x80\x05\x95\x10\x00\x00\x00\x00\x00\x00\x00",
    FrameType::WorkerQueue,
    FrameResult::Ignored
)]
#[case::registration(
    STAGE,
    b"\x82\xa8stage_id\x01\xaareplica_id\xff",
    FrameType::Registration,
    FrameResult::Ignored
)]
#[case::transfer_engine(
    STAGE,
    b"query_info\x81\xaarequest_id\xa1a",
    FrameType::Connector,
    FrameResult::Decoded
)]
#[case::empty(STAGE, b"", FrameType::Signal, FrameResult::Ignored)]
#[case::outer_array_of_a_future_release(
    STAGE,
    b"\x9a\x00\x90\xc0\xc0\xc0\xc0\xc0\xc0\xc0\xc0",
    FrameType::Outputs,
    FrameResult::UnknownLayout
)]
#[case::trailing_bytes(
    STAGE,
    b"\x98\x00\x90\xc0\x01\xc0\xc0\xc0\xc0\xc0",
    FrameType::Outputs,
    FrameResult::Malformed
)]
fn a_message_of_one_part(
    #[case] role: Role,
    #[case] bytes: &[u8],
    #[case] kind: FrameType,
    #[case] result: FrameResult,
) {
    let mut decoder = decoder(role);
    assert_eq!(label(&mut decoder, &frame(bytes)), (kind, result));
    assert_eq!(decoder.open_messages(), 0);
}

#[test]
fn a_frame_of_a_process_that_is_not_watched() {
    let mut decoder = decoder(STAGE);
    let stranger = Frame {
        pid: PID + 1,
        ..frame(b"ENGINE_CORE_DEAD")
    };
    assert_eq!(
        label(&mut decoder, &stranger),
        (FrameType::Other, FrameResult::UnknownProcess)
    );
    decoder.process_known(PID + 1, Role::Headless, Flavor::Omni, &Versions::default());
    assert_eq!(
        label(&mut decoder, &stranger),
        (FrameType::Other, FrameResult::UnknownProcess)
    );
}

#[test]
fn an_add_names_the_engine_it_is_for() {
    let add = case("real omni 0.30.0: request");
    let payload = add.payload();
    let mut decoder = decoder(Role::ApiWorker { index: 3 });
    assert_eq!(
        label(&mut decoder, &more(&[2, 1])),
        (FrameType::Envelope, FrameResult::Part)
    );
    assert_eq!(
        label(&mut decoder, &more(&[0])),
        (FrameType::Envelope, FrameResult::Part)
    );
    let decoded = decoder.frame(&frame(&payload));
    let Content::Message {
        message: Message::Add(_),
        target,
    } = decoded.content
    else {
        panic!("{decoded:?}");
    };
    assert_eq!(target, Some(258));
}

#[test]
fn addresses_answer_a_hello_behind_an_identity() {
    let mut decoder = decoder(Role::ApiServer);
    label(&mut decoder, &more(&[0, 0]));
    let reply = b"\x82\xa9addresses\x80\xafparallel_config\x80";
    assert_eq!(
        label(&mut decoder, &frame(reply)),
        (FrameType::Handshake, FrameResult::Decoded)
    );
}

#[test]
fn sockets_of_one_process_do_not_mix() {
    let add = case("real omni 0.30.0: request").payload();
    let abort = case("real omni 0.30.0: abort").payload();
    let mut decoder = decoder(Role::ApiServer);
    let on = |socket: u64, part: Frame<'static>| Frame { socket, ..part };
    for (socket, request) in [(1, &[0_u8]), (2, &[1_u8])] {
        label(&mut decoder, &on(socket, more(&[0, 0])));
        label(&mut decoder, &on(socket, more(request)));
    }
    let second = Frame {
        socket: 2,
        ..frame(&abort)
    };
    let first = Frame {
        socket: 1,
        ..frame(&add)
    };
    assert_eq!(
        label(&mut decoder, &second),
        (FrameType::Abort, FrameResult::Decoded)
    );
    assert_eq!(
        label(&mut decoder, &first),
        (FrameType::Add, FrameResult::Decoded)
    );
    assert_eq!(decoder.open_messages(), 0);
}

#[test]
fn aux_parts_belong_to_their_payload() {
    let audio = case("real omni 0.30.0: audio chunk");
    let payload = audio.payload();
    let mut decoder = decoder(STAGE);
    let sent = Frame {
        time_ns: 77,
        ..more(&payload)
    };
    assert_eq!(
        label(&mut decoder, &sent),
        (FrameType::Outputs, FrameResult::Decoded)
    );
    let part = Frame {
        time_ns: 99,
        aux: true,
        size: 7680,
        ..frame(&[])
    };
    let decoded = decoder.frame(&part);
    let Content::Aux(aux) = decoded.content else {
        panic!("{decoded:?}")
    };
    assert_eq!(
        (aux.message_time_ns, aux.socket, aux.size, aux.of),
        (77, part.socket, 7680, FrameType::Outputs)
    );
    assert_eq!(decoder.open_messages(), 0);
}

/// Each frame of a message is lost in turn: the next message must come through.
#[rstest]
#[case::identity(0)]
#[case::request_type(1)]
#[case::payload(2)]
#[case::aux(3)]
fn a_lost_frame_of_a_request_costs_no_other_message(#[case] lost: usize) {
    let add = case("real omni 0.30.0: request of embeddings").payload();
    let parts = [
        more(&[0, 0]),
        more(&[0]),
        more(&add),
        Frame {
            aux: true,
            size: 2304,
            ..frame(&[])
        },
    ];
    let mut decoder = decoder(Role::ApiServer);
    for (index, part) in parts.iter().enumerate() {
        if index != lost {
            decoder.frame(part);
        }
    }
    let results: Vec<_> = parts.iter().map(|part| label(&mut decoder, part)).collect();
    assert_eq!(
        results,
        [
            (FrameType::Envelope, FrameResult::Part),
            (FrameType::Envelope, FrameResult::Part),
            (FrameType::Add, FrameResult::Decoded),
            (FrameType::Aux, FrameResult::Part),
        ]
    );
}

#[rstest]
#[case::payload(0)]
#[case::aux(1)]
fn a_lost_frame_of_outputs_costs_no_other_message(#[case] lost: usize) {
    let audio = case("real omni 0.30.0: audio chunk").payload();
    let parts = [
        more(&audio),
        Frame {
            aux: true,
            size: 7680,
            ..frame(&[])
        },
    ];
    let mut decoder = decoder(STAGE);
    for (index, part) in parts.iter().enumerate() {
        if index != lost {
            decoder.frame(part);
        }
    }
    assert_eq!(
        label(&mut decoder, &parts[0]),
        (FrameType::Outputs, FrameResult::Decoded)
    );
    assert_eq!(
        label(&mut decoder, &parts[1]),
        (FrameType::Aux, FrameResult::Part)
    );
}

#[test]
fn an_aux_part_without_its_payload_is_an_orphan() {
    let mut decoder = decoder(STAGE);
    let part = Frame {
        aux: true,
        size: 7680,
        ..frame(&[])
    };
    assert_eq!(label(&mut decoder, &part), (FrameType::Aux, FrameResult::Orphan));
}

#[test]
fn what_is_left_open_is_bounded_and_forgotten() {
    let mut decoder = decoder(STAGE);
    let payload = case("real omni 0.30.0: audio chunk").payload();
    for socket in 0..10_000 {
        decoder.frame(&Frame {
            socket,
            time_ns: 1_000 + socket,
            ..more(&payload)
        });
        assert!(decoder.open_messages() <= 256);
    }
    // After a time without parts a message has none any more.
    let late = Frame {
        socket: 9_999,
        time_ns: 60_000_000_000,
        aux: true,
        size: 1000,
        ..frame(&[])
    };
    assert_eq!(label(&mut decoder, &late), (FrameType::Aux, FrameResult::Orphan));
    decoder.process_gone(PID);
    assert_eq!(decoder.open_messages(), 0);
}

#[test]
fn every_label_value_is_used_once() {
    let mut names: Vec<_> = FrameType::ALL.iter().map(|kind| kind.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), FrameType::ALL.len());
    let mut names: Vec<_> = FrameResult::ALL.iter().map(|result| result.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), FrameResult::ALL.len());
}
