//! The engine's own metrics as a source: what is passed on, what is not, and where the two disagree.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{fs::File, net::SocketAddr, path::Path, time::Duration};

use omnitap::{
    fill::{
        parse::parse,
        sample::{EngineSample, Failure, Outcome},
        scrape::fetch,
    },
    host::identity::{Change, Flavor, Pipeline, PipelineId, Process, ProcessKey, Role, Versions},
    metrics::{registry::Limits, text::Format},
    observer::Observer,
    pipeline::tracker,
    record::{Entries, Entry, Item, Writer},
};
use rstest::rstest;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

const ID: PipelineId = PipelineId(1);
const KEY: ProcessKey = ProcessKey {
    pid: 100,
    start_ticks: 1,
};

fn empty() -> Observer {
    let limits = Limits {
        max_series: 50_000,
        retention: Duration::from_mins(15),
    };
    Observer::new(limits, tracker::Limits::default())
}

/// A pipeline of which no frame is seen.
fn unseen(flavor: Flavor) -> Observer {
    let mut observer = empty();
    observer.change(
        &Change::Pipeline(Pipeline {
            id: ID,
            flavor,
            model: Some("path/m".to_owned()),
            served_model: Some("m".to_owned()),
            versions: Versions::default(),
            max_model_len: None,
            root: KEY,
        }),
        0,
    );
    observer.change(
        &Change::Process(Process {
            key: KEY,
            parent: 1,
            role: Role::ApiServer,
            pipeline: ID,
            container: None,
        }),
        0,
    );
    observer
}

fn read(observer: &mut Observer, text: &str) {
    take(observer, text, false);
}

fn take(observer: &mut Observer, text: &str, is_fresh: bool) {
    observer.engine(&EngineSample {
        pipeline: ID,
        is_fresh,
        outcome: Outcome::Read(parse(text).unwrap()),
    });
}

fn fail(observer: &mut Observer, failure: Failure) {
    observer.engine(&EngineSample {
        pipeline: ID,
        is_fresh: false,
        outcome: Outcome::Failed(failure),
    });
}

fn exposed(observer: &Observer) -> String {
    let mut out = Vec::new();
    observer.exposition().render(&mut out, Format::Text);
    String::from_utf8(out).unwrap()
}

/// The value of a sample line.
fn value(observer: &Observer, sample: &str) -> Option<f64> {
    exposed(observer)
        .lines()
        .find_map(|line| line.strip_prefix(sample)?.strip_prefix(' ')?.parse().ok())
}

fn waits(up_to_half: u32, all: u32, sum: f64) -> String {
    let labels = r#"model_name="path/m""#;
    [
        0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0,
    ]
    .map(|bound| {
        let count = if bound < 0.5 { up_to_half } else { all };
        format!("vllm_omni:request_queue_wait_s_bucket{{le=\"{bound:?}\",{labels}}} {count}.0\n")
    })
    .concat()
        + &format!(
            "vllm_omni:request_queue_wait_s_bucket{{le=\"+Inf\",{labels}}} {all}.0\n\
             vllm_omni:request_queue_wait_s_count{{{labels}}} {all}.0\n\
             vllm_omni:request_queue_wait_s_sum{{{labels}}} {sum}\n"
        )
}

fn counter(value: u32) -> String {
    format!("vllm:num_preemptions_total{{model_name=\"m\",replica=\"1\",stage=\"2\"}} {value}.0\n")
}
const COUNTER: &str = r#"vllm:num_preemptions_total{model_name="m",replica="1",stage="2"}"#;

fn gauge(value: u32) -> String {
    format!("vllm_omni:num_requests_running{{model_name=\"path/m\"}} {value}.0\n")
}
const GAUGE: &str = r#"vllm_omni:num_requests_running{model_name="path/m"}"#;

#[test]
fn counters_go_on_from_where_they_were_found() {
    let mut observer = unseen(Flavor::Omni);
    for (count, expected) in [
        // What was there is not ours to count.
        (1000, None),
        (1003, Some(0.0)),
        // What a read adds comes with the next one.
        (1003, Some(3.0)),
        (1010, Some(3.0)),
        (1010, Some(10.0)),
        // The server's counter begins anew.
        (2, Some(10.0)),
        (2, Some(12.0)),
    ] {
        read(&mut observer, &counter(count));
        assert_eq!(value(&observer, COUNTER), expected, "at {count}");
    }
    let source = r#"omnitap_source_state{family="vllm:num_preemptions_total",pipeline="1",source="engine"}"#;
    assert_eq!(value(&observer, source), None);
    observer.tick(1);
    assert_eq!(value(&observer, source), Some(1.0));
}

#[test]
fn a_server_that_starts_under_our_eyes_is_counted_from_its_start() {
    let mut observer = unseen(Flavor::Omni);
    take(&mut observer, &counter(5), true);
    take(&mut observer, &counter(7), true);
    assert_eq!(value(&observer, COUNTER), Some(5.0));
    take(&mut observer, &counter(7), true);
    assert_eq!(value(&observer, COUNTER), Some(7.0));
}

#[test]
fn zero_is_no_measurement_before_something_else_was() {
    let mut observer = unseen(Flavor::Omni);
    let usage = r#"vllm:kv_cache_usage_perc{model_name="m",replica="0",stage="0"}"#;
    for (read_value, expected) in [(0.0, None), (0.5, Some(0.5)), (0.0, Some(0.0))] {
        read(&mut observer, &(format!("{usage} {read_value}\n") + &counter(0)));
        assert_eq!(value(&observer, usage), expected);
        assert_eq!(value(&observer, COUNTER), None);
    }
}

#[test]
fn a_tap_that_sees_nothing_does_not_stand_in_the_way() {
    let mut observer = unseen(Flavor::Omni);
    observer.tick(1);
    assert_eq!(
        value(&observer, GAUGE),
        Some(0.0),
        "the tap's word, for want of another"
    );
    read(&mut observer, &gauge(3));
    observer.tick(2);
    assert_eq!(value(&observer, GAUGE), Some(3.0));
}

#[test]
fn histograms_are_added_bucket_by_bucket() {
    let mut observer = unseen(Flavor::Omni);
    for (up_to_half, all, sum) in [(4, 5, 3.0), (6, 8, 5.5), (6, 8, 5.5)] {
        read(&mut observer, &waits(up_to_half, all, sum));
    }
    let text = exposed(&observer);
    let told: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("vllm_omni:request_queue_wait_s") && !line.ends_with(" 0.0"))
        .collect();
    insta::assert_snapshot!(told.join("\n"), @r#"
    vllm_omni:request_queue_wait_s_bucket{le="0.05",model_name="path/m"} 2.0
    vllm_omni:request_queue_wait_s_bucket{le="0.1",model_name="path/m"} 2.0
    vllm_omni:request_queue_wait_s_bucket{le="0.25",model_name="path/m"} 2.0
    vllm_omni:request_queue_wait_s_bucket{le="0.5",model_name="path/m"} 3.0
    vllm_omni:request_queue_wait_s_bucket{le="1.0",model_name="path/m"} 3.0
    vllm_omni:request_queue_wait_s_bucket{le="2.0",model_name="path/m"} 3.0
    vllm_omni:request_queue_wait_s_bucket{le="5.0",model_name="path/m"} 3.0
    vllm_omni:request_queue_wait_s_bucket{le="10.0",model_name="path/m"} 3.0
    vllm_omni:request_queue_wait_s_bucket{le="20.0",model_name="path/m"} 3.0
    vllm_omni:request_queue_wait_s_bucket{le="30.0",model_name="path/m"} 3.0
    vllm_omni:request_queue_wait_s_bucket{le="60.0",model_name="path/m"} 3.0
    vllm_omni:request_queue_wait_s_bucket{le="120.0",model_name="path/m"} 3.0
    vllm_omni:request_queue_wait_s_bucket{le="300.0",model_name="path/m"} 3.0
    vllm_omni:request_queue_wait_s_bucket{le="+Inf",model_name="path/m"} 3.0
    vllm_omni:request_queue_wait_s_count{model_name="path/m"} 3.0
    vllm_omni:request_queue_wait_s_sum{model_name="path/m"} 2.5
    "#);
}

#[test]
fn buckets_that_are_others_are_skipped() {
    let mut observer = unseen(Flavor::Omni);
    let steps = |count| {
        format!(
            "vllm_omni:num_inference_steps_bucket{{le=\"0.005\",model_name=\"path/m\"}} 0.0\n\
             vllm_omni:num_inference_steps_bucket{{le=\"+Inf\",model_name=\"path/m\"}} {count}.0\n\
             vllm_omni:num_inference_steps_count{{model_name=\"path/m\"}} {count}.0\n\
             vllm_omni:num_inference_steps_sum{{model_name=\"path/m\"}} 100.0\n"
        )
    };
    for count in [1, 4, 4] {
        read(&mut observer, &steps(count));
    }
    let skipped =
        r#"omnitap_samples_skipped_total{family="vllm_omni:num_inference_steps",reason="other_buckets"}"#;
    assert_eq!(value(&observer, skipped), Some(2.0));
    assert_eq!(
        value(
            &observer,
            r#"vllm_omni:num_inference_steps_count{model_name="path/m"}"#
        ),
        Some(0.0)
    );
}

#[test]
fn plain_vllm_has_its_rank_as_replica() {
    let mut observer = unseen(Flavor::Vllm);
    let text = |count| format!("vllm:num_preemptions_total{{engine=\"3\",model_name=\"m\"}} {count}.0\n");
    for count in [0, 2, 2] {
        read(&mut observer, &text(count));
    }
    let ours = r#"vllm:num_preemptions_total{model_name="m",replica="3",stage="0"}"#;
    assert_eq!(value(&observer, ours), Some(2.0));
}

#[test]
fn processes_of_one_server_are_one_child() {
    let mut observer = unseen(Flavor::Omni);
    read(
        &mut observer,
        "vllm_omni:num_requests_running{model_name=\"path/m\",pid=\"7\"} 2.0\n\
         vllm_omni:num_requests_running{model_name=\"path/m\",pid=\"8\"} 3.0\n",
    );
    assert_eq!(value(&observer, GAUGE), Some(5.0));
}

#[test]
fn hollow_families_are_left_out() {
    let mut observer = unseen(Flavor::Omni);
    let labels = r#"{from_replica="0",from_stage="0",model_name="path/m",to_replica="0",to_stage="1"}"#;
    for count in [1, 2, 2] {
        read(
            &mut observer,
            &format!(
                "vllm_omni:transfer_size_bytes_count{labels} {count}.0\n\
                 vllm_omni:transfer_size_bytes_sum{labels} 0.0\n"
            ),
        );
    }
    assert!(!exposed(&observer).contains("transfer_size_bytes_count{"));
}

#[test]
fn gauges_of_a_server_that_answers_no_more_fall_away() {
    let mut observer = unseen(Flavor::Omni);
    for count in [0, 1, 1] {
        read(&mut observer, &(gauge(4) + &counter(count)));
    }
    fail(&mut observer, Failure::Timeout);
    fail(&mut observer, Failure::Connection);
    assert_eq!(value(&observer, GAUGE), Some(4.0));
    fail(&mut observer, Failure::Unauthorized);
    assert_eq!(value(&observer, GAUGE), None);
    // Counters stay, and go on when it comes back: nothing is counted twice.
    assert_eq!(value(&observer, COUNTER), Some(1.0));
    read(&mut observer, &(gauge(1) + &counter(3)));
    read(&mut observer, &(gauge(1) + &counter(3)));
    assert_eq!(value(&observer, GAUGE), Some(1.0));
    assert_eq!(value(&observer, COUNTER), Some(3.0));
    for (result, count) in [
        ("ok", 5.0),
        ("timeout", 1.0),
        ("connection", 1.0),
        ("unauthorized", 1.0),
    ] {
        let sample = format!("omnitap_engine_reads_total{{result=\"{result}\"}}");
        assert_eq!(value(&observer, &sample), Some(count), "{result}");
    }
    observer.change(&Change::PipelineGone(ID), 9);
    assert_eq!(value(&observer, GAUGE), None);
    // A read that comes late counts for nothing.
    read(&mut observer, &gauge(1));
    assert_eq!(value(&observer, GAUGE), None);
}

/// A pipeline whose frames are seen: a recording of a real server.
fn seen(name: &str) -> Observer {
    let mut observer = empty();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/recordings/{name}.jsonl.gz"));
    for entry in Entries::new(File::open(file).unwrap()).unwrap() {
        let entry = entry.unwrap();
        // The end of the recording is not the end of the pipeline.
        if !matches!(
            entry.item,
            Item::Change(Change::ProcessGone(_) | Change::PipelineGone(_))
        ) {
            observer.replay(&entry);
        }
    }
    observer
}

#[test]
fn what_the_tap_sees_is_not_taken_from_the_engine() {
    let mut observer = seen("omni");
    let before = exposed(&observer);
    let pipeline = before.lines().find_map(|line| {
        let rest = line.strip_prefix("omnitap_pipeline_info{")?;
        rest.split_once("pipeline=\"")?.1.split_once('"')?.0.parse().ok()
    });
    let id = PipelineId(pipeline.unwrap());
    // A server that agrees with the agent.
    let mut text = before.clone();
    let take = |observer: &mut Observer, text: &str| {
        observer.engine(&EngineSample {
            pipeline: id,
            is_fresh: false,
            outcome: Outcome::Read(parse(text).unwrap()),
        });
    };
    for _ in 0..3 {
        take(&mut observer, &text);
    }
    let after = exposed(&observer);
    let of_engine = |text: &str| -> Vec<String> {
        text.lines()
            .filter(|line| line.starts_with("vllm"))
            .map(str::to_owned)
            .collect()
    };
    assert_eq!(of_engine(&after), of_engine(&before));
    let disagreements = |observer: &Observer| -> Vec<String> {
        exposed(observer)
            .lines()
            .filter(|line| line.starts_with("omnitap_engine_disagreement{") && !line.ends_with(" 0.0"))
            .map(str::to_owned)
            .collect()
    };
    let compared = after
        .lines()
        .filter(|line| line.starts_with("omnitap_engine_disagreement{"))
        .count();
    assert!(compared > 20, "{compared} families compared");
    assert_eq!(disagreements(&observer), [""; 0]);

    // The engine counts ten tokens more.
    let line = text
        .lines()
        .find(|line| line.starts_with("vllm:generation_tokens_total{") && !line.ends_with(" 0.0"))
        .unwrap()
        .to_owned();
    let (name, old) = line.rsplit_once(' ').unwrap();
    let more = format!("{name} {}", old.parse::<f64>().unwrap() + 10.0);
    text = text.replace(&line, &more);
    take(&mut observer, &text);
    assert_eq!(disagreements(&observer), [""; 0], "told at rest only");
    take(&mut observer, &text);
    let told = format!(
        "omnitap_engine_disagreement{{family=\"vllm:generation_tokens_total\",pipeline=\"{}\"}} 1.0",
        id.0
    );
    assert_eq!(disagreements(&observer), [told]);
    observer.change(&Change::PipelineGone(id), u64::MAX / 2);
    assert_eq!(disagreements(&observer), [""; 0]);
}

#[test]
fn what_the_tap_cannot_see_is_filled_beside_it() {
    let mut observer = seen("omni");
    let text = exposed(&observer);
    let model = text
        .lines()
        .find(|line| line.starts_with("vllm_omni:requests_success_total{"))
        .and_then(|line| line.split_once("model_name=\"")?.1.split_once('"'))
        .unwrap()
        .0
        .to_owned();
    for (up_to_half, all, sum) in [(0, 0, 0.0), (6, 8, 5.5), (6, 8, 5.5)] {
        observer.engine(&EngineSample {
            pipeline: PipelineId(0),
            is_fresh: false,
            outcome: Outcome::Read(parse(&waits(up_to_half, all, sum)).unwrap()),
        });
    }
    let sample = format!("vllm_omni:request_queue_wait_s_count{{model_name=\"{model}\"}}");
    assert_eq!(value(&observer, &sample), Some(8.0));
}

#[test]
fn a_recording_gives_the_same() {
    let mut observer = unseen(Flavor::Omni);
    let mut again = unseen(Flavor::Omni);
    let mut writer = Writer::new(Vec::new(), true).unwrap();
    for count in [1, 5, 5] {
        let sample = EngineSample {
            pipeline: ID,
            is_fresh: true,
            outcome: Outcome::Read(
                parse(&(waits(count, count, 0.5) + &gauge(count) + &counter(count))).unwrap(),
            ),
        };
        observer.engine(&sample);
        writer
            .entry(&Entry {
                t: 1,
                item: Item::Engine(sample),
            })
            .unwrap();
    }
    for entry in Entries::new(std::io::Cursor::new(writer.finish().unwrap())).unwrap() {
        again.replay(&entry.unwrap());
    }
    let lines = |observer: &Observer| -> Vec<String> {
        exposed(observer)
            .lines()
            .filter(|line| line.starts_with("vllm"))
            .map(str::to_owned)
            .collect()
    };
    assert_eq!(lines(&again), lines(&observer));
}

/// A server that answers one connection with these bytes, in pieces.
async fn server(answer: Vec<Vec<u8>>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = [0; 1024];
        let length = stream.read(&mut request).await.unwrap();
        assert!(request[..length].starts_with(b"GET /metrics HTTP/1.1\r\n"));
        for piece in answer {
            if stream.write_all(&piece).await.is_err() {
                return;
            }
        }
    });
    address
}

fn answer(status: &str, body: &str) -> Vec<Vec<u8>> {
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n", body.len());
    vec![head.into_bytes(), body.as_bytes().to_vec()]
}

#[rstest]
#[case::read(answer("200 OK", "vllm:num_preemptions_total 3.0\n"), Ok(1))]
#[case::until_the_end(vec![b"HTTP/1.0 200 OK\r\n\r\nvllm:num_preemptions_total 3.0\n".to_vec()], Ok(1))]
#[case::log_stats_off(answer("200 OK", "python_info 1.0\n"), Ok(0))]
#[case::empty(answer("200 OK", ""), Ok(0))]
#[case::key_asked(answer("401 Unauthorized", "no"), Err(Failure::Unauthorized))]
#[case::forbidden(answer("403 Forbidden", "no"), Err(Failure::Unauthorized))]
#[case::absent(answer("404 Not Found", "no"), Err(Failure::NotFound))]
#[case::elsewhere(answer("307 Temporary Redirect", ""), Err(Failure::Status))]
#[case::broken(answer("500 Internal Server Error", "x"), Err(Failure::Status))]
#[case::web_page(answer("200 OK", "<html>"), Err(Failure::Malformed))]
#[case::no_utf8(vec![b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xfe".to_vec()], Err(Failure::Malformed))]
#[case::no_http(vec![b"SSH-2.0-OpenSSH\r\n".to_vec()], Err(Failure::Connection))]
#[case::broken_off(vec![b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nvllm".to_vec()], Err(Failure::Connection))]
#[case::nothing(vec![], Err(Failure::Connection))]
#[case::endless(
    std::iter::once(b"HTTP/1.1 200 OK\r\n\r\n".to_vec()).chain(std::iter::repeat_n(vec![b'#'; 1 << 20], 64)).collect(),
    Err(Failure::TooLong)
)]
#[tokio::test]
async fn servers_answer(#[case] answer: Vec<Vec<u8>>, #[case] expected: Result<usize, Failure>) {
    let address = server(answer).await;
    assert_eq!(fetch(address).await.map(|children| children.len()), expected);
}

#[tokio::test]
async fn nobody_listens() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    assert_eq!(fetch(address).await, Err(Failure::Connection));
}
