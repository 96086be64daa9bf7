//! A day of looks at GPUs, with processes, strangers and instances that come and go, leaves nothing behind. Alone in its
//! process: what it measures is the memory of that.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::time::Duration;

use omnitap::{
    gpu::sample::{Device, GpuProcess, GpuSample, Owner, State},
    host::identity::{Change, Flavor, Pipeline, PipelineId, Process, ProcessKey, Role, Versions},
    metrics::{registry::Limits, text::Format},
    observer::Observer,
    pipeline::tracker,
};

const SECOND: u64 = 1_000_000_000;
const HOUR: u32 = 3600;

fn key(pid: u32) -> ProcessKey {
    ProcessKey { pid, start_ticks: 1 }
}

/// The stage's process of a minute.
fn process(pid: u32) -> Process {
    Process {
        key: key(pid),
        parent: 1000,
        role: Role::LlmStage {
            stage: Some(0),
            replica: Some(pid % 4),
        },
        pipeline: PipelineId(1),
        container: None,
    }
}

/// The GPU at a second: used by the stage and by a stranger of that second, divided every other hour.
fn sample(second: u32, pid: u32) -> GpuSample {
    let used = u64::from(second % 50) << 30;
    let of_stage = GpuProcess {
        pid,
        owner: Owner::Watched(pid),
        used: Some(used),
        peak: None,
    };
    let stranger = GpuProcess {
        pid: 90_000 + second,
        owner: Owner::Foreign,
        used: None,
        peak: None,
    };
    GpuSample {
        state: State::Ok,
        pause_ms: 1000,
        devices: vec![Device {
            mig: (second / HOUR % 2 == 1).then_some(second / 600 % 7),
            uuid: Some("GPU-aaaa".to_owned()),
            memory: Some((used, 80 << 30)),
            processes: Some(vec![of_stage, stranger]),
            ..Device::default()
        }],
        ..GpuSample::default()
    }
}

fn resident_bytes() -> u64 {
    let stat = procfs::process::Process::myself().unwrap().stat().unwrap();
    stat.rss * procfs::page_size()
}

fn lines(observer: &Observer) -> usize {
    let mut out = Vec::new();
    observer.exposition().render(&mut out, Format::Text);
    String::from_utf8(out).unwrap().lines().count()
}

#[test]
fn a_day_leaves_nothing_behind() {
    let limits = Limits {
        max_series: 50_000,
        retention: Duration::from_mins(15),
    };
    let mut observer = Observer::new(limits, tracker::Limits::default());
    observer.change(
        &Change::Pipeline(Pipeline {
            id: PipelineId(1),
            flavor: Flavor::Omni,
            model: Some("talker".to_owned()),
            served_model: Some("talker".to_owned()),
            versions: Versions::default(),
            max_model_len: None,
            root: key(1000),
        }),
        0,
    );
    let mut early = None;
    for second in 0..24 * HOUR {
        let (now, pid) = (u64::from(second) * SECOND, 10_000 + second / 60);
        if second % 60 == 0 {
            observer.change(&Change::ProcessGone(key(pid - 1)), now);
            observer.change(&Change::Process(process(pid)), now);
        }
        observer.gpu(&sample(second, pid), now);
        observer.tick(now);
        if second == 2 * HOUR - 1 {
            early = Some((observer.gpus().remembered(), lines(&observer), resident_bytes()));
        }
    }
    let (remembered, text, bytes) = early.unwrap();
    assert_eq!(observer.gpus().remembered(), remembered);
    assert_eq!(lines(&observer), text);
    let grown = resident_bytes().saturating_sub(bytes);
    println!("{grown} bytes more after 22 hours");
    assert!(grown < 1 << 20, "{grown} bytes more after 22 hours");
}
