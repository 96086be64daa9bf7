//! Frames of every known release give what they say: by version, and by their own shape.

#![allow(
    clippy::unwrap_used,
    clippy::similar_names,
    reason = "a failed unwrap is a failed test; `decoder` and `decoded` are what they are called"
)]

mod support;

use omnitap::{
    host::identity::Versions,
    wire::assemble::{Content, FrameResult, FrameType},
};
use rstest::rstest;
use support::{Case, cases, frame, said};

fn decode(case: &Case, versions: &Versions) -> Result<(), String> {
    let payload = case.payload();
    let mut decoder = case.decoder(versions);
    let decoded = case.decode(&mut decoder, payload.len(), &payload, &[]);
    let said = said(&decoded);
    if decoded.result != FrameResult::Decoded || said != case.want {
        return Err(format!("{}:\n  said {said}\n  want {}\n", case.name, case.want));
    }
    for (index, size) in case.aux.iter().enumerate() {
        let more = index + 1 < case.aux.len();
        let part = omnitap::wire::frame::Frame {
            more,
            aux: true,
            size: *size,
            ..frame(&[])
        };
        let decoded = decoder.frame(&part);
        let Content::Aux(aux) = decoded.content else {
            return Err(format!("{}: part {index} is no aux: {decoded:?}\n", case.name));
        };
        if (aux.size, aux.of)
            != (
                *size,
                if case.is_from_engine() {
                    FrameType::Outputs
                } else {
                    FrameType::Add
                },
            )
        {
            return Err(format!("{}: part {index} says {aux:?}\n", case.name));
        }
    }
    match decoder.open_messages() {
        0 => Ok(()),
        open => Err(format!("{}: {open} messages are left open\n", case.name)),
    }
}

#[test]
fn every_frame_decodes_by_version() {
    let wrong: String = cases()
        .iter()
        .filter_map(|case| decode(case, &case.versions()).err())
        .collect();
    assert_eq!(wrong, "");
}

#[test]
fn every_frame_decodes_by_its_shape() {
    // A pair of releases that does not belong together has lengths that no table has.
    let is_odd_pair =
        |case: &Case| case.omni.as_deref() == Some("0.28.0") && case.vllm.as_deref() == Some("0.29.0");
    let wrong: String = cases()
        .iter()
        .filter(|case| !is_odd_pair(case))
        .filter_map(|case| decode(case, &Versions::default()).err())
        .collect();
    assert_eq!(wrong, "");
}

#[rstest]
#[case::older_vllm("vllm 0.30.0: decode tokens", "0.28.0", None)]
#[case::newer_vllm("vllm 0.30.0: decode tokens", "0.33.0", None)]
#[case::outer_array_grew("vllm 0.31.0: statistics alone", "0.32.0", None)]
#[case::outer_array_shrank("vllm 0.32.0: statistics alone", "0.31.0", None)]
#[case::older_omni("vllm 0.30.0 omni 0.30.0: decode tokens", "0.28.0", Some("0.28.0"))]
#[case::request("vllm 0.30.0: request", "0.27.0", None)]
#[case::request_of_omni("vllm 0.30.0 omni 0.30.0: request", "0.26.0", Some("0.26.0"))]
fn a_frame_of_another_version_is_an_unknown_layout(
    #[case] name: &str,
    #[case] vllm: &str,
    #[case] omni: Option<&str>,
) {
    let case = cases().into_iter().find(|case| case.name == name).unwrap();
    let versions = Versions {
        vllm: Some(vllm.to_owned()),
        omni: omni.map(str::to_owned),
    };
    let payload = case.payload();
    let mut decoder = case.decoder(&versions);
    let decoded = case.decode(&mut decoder, payload.len(), &payload, &[]);
    assert_eq!(decoded.result, FrameResult::UnknownLayout, "{decoded:?}");
}

#[rstest]
#[case::newer_than_any_known(Some("0.34.0"), None)]
#[case::development_build(Some("0.29.1.dev12"), None)]
#[case::not_a_version(Some("unknown"), None)]
fn an_unknown_version_leaves_it_to_the_shape(#[case] vllm: Option<&str>, #[case] omni: Option<&str>) {
    let case = cases()
        .into_iter()
        .find(|case| case.name == "vllm 0.30.0: decode tokens")
        .unwrap();
    let versions = Versions {
        vllm: vllm.map(str::to_owned),
        omni: omni.map(str::to_owned),
    };
    assert_eq!(decode(&case, &versions), Ok(()));
}

#[test]
fn the_ready_frame_tells_the_version_where_nothing_else_does() {
    let all = cases();
    let find = |name: &str| all.iter().find(|case| case.name == name).unwrap();
    let ready = find("real vllm 0.30.0: ready");
    let mut decoder = ready.decoder(&Versions::default());
    let payload = ready.payload();
    ready.decode(&mut decoder, payload.len(), &payload, &[]);
    // A frame that its shape alone would have let pass contradicts the version now.
    let other = find("vllm 0.33.0: decode tokens");
    let payload = other.payload();
    assert_eq!(
        other.decode(&mut decoder, payload.len(), &payload, &[]).result,
        FrameResult::UnknownLayout
    );
    let same = find("real vllm 0.30.0: decode token");
    let payload = same.payload();
    assert_eq!(
        same.decode(&mut decoder, payload.len(), &payload, &[]).result,
        FrameResult::Decoded
    );
}
