//! The agent beside a pipeline that hands payloads on through shared memory: every hop against the pipeline's own
//! clocks, and what becomes of the ends that stay alone.
#![expect(clippy::float_cmp, reason = "counters of whole things are compared exactly")]
#![expect(clippy::cast_precision_loss, reason = "some thousands of hops and bytes")]

use std::{
    collections::BTreeMap,
    fs::File,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use omnitap::record::{Entries, Item, ShmWhat};
use omnitap_tests::{
    agent::Agent,
    hops::{End, Hop, Hops, Place, seconds},
    pipeline::{Options, Pipeline},
    probed::changed_in,
    scrape::Scrape,
};
use serde_json::{Value, json};

/// How soon a running pipeline must be found.
const FOUND: Duration = Duration::from_secs(5);
/// How soon values must be right after the last message.
const SETTLED: Duration = Duration::from_secs(10);
/// How long a payload of a process that is gone stays open, and some time to notice.
const SENDER_GONE: Duration = Duration::from_secs(15);
/// Rounds of the test that kills processes; 20 without it.
const ROUNDS: &str = "OMNITAP_TEST_ROUNDS";

const SIZE: &str = "vllm_omni:transfer_size_bytes";
const TX: &str = "vllm_omni:transfer_tx_s";
const RX: &str = "vllm_omni:transfer_rx_s";
const IN_FLIGHT: &str = "vllm_omni:transfer_in_flight_s";

/// Two stages, the second with two replicas that are given a request when the first is, as with asynchronous chunks.
fn scenario(phases: &Value) -> Value {
    json!({
        "forward": "prewarm",
        "stages": [
            {"kind": "ar", "step_ms": 20},
            {"kind": "generation", "replicas": 2, "step_ms": 10}
        ],
        "phases": phases
    })
}

/// Requests that hand payloads on, one with each token.
fn requests(repeat: u32, every: f64, payloads: &[Value]) -> Value {
    // A second each: a player never waits for one that a delayed payload holds up for some 100 ms, which is the
    // bound of what counts as continuous.
    let chunks: Vec<Value> = payloads.iter().map(|_| json!({"frames": 24_000})).collect();
    json!({"repeat": repeat, "every": every, "stages": [
        {"tokens": payloads.len(), "finish": "stop", "payloads": payloads},
        {"chunks": chunks, "finish": "stop"}
    ]})
}

/// Waits until all stages have the probes of shared memory.
fn found(agent: &Agent, pipeline: &Pipeline) -> Result<()> {
    let engines = [(0, 0), (1, 0), (1, 1)].map(|(stage, replica)| pipeline.engine(stage, replica));
    let until = Instant::now() + FOUND;
    for pid in engines.into_iter().flatten() {
        // A breakpoint on each of four functions.
        while changed_in(pid, "libc.so.").is_ok_and(|changed| changed < 4) {
            ensure!(Instant::now() < until, "{pid} is not probed:\n{}", agent.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    let model = [("model_name", pipeline.options().model.as_str())];
    agent.scrape_until(FOUND, |scrape| scrape.sum("omnitap_pipeline_info", &model) > 0.0)?;
    Ok(())
}

fn open(scrape: &Scrape) -> f64 {
    scrape.sum("omnitap_transfers_open", &[])
}

/// Skipped samples of a family, by reason.
fn skipped(scrape: &Scrape, family: &str) -> BTreeMap<String, f64> {
    scrape
        .matching("omnitap_samples_skipped_total", &[("family", family)])
        .filter(|&(_, value)| value > 0.0)
        .filter_map(|(series, value)| Some((series.labels.get("reason")?.clone(), value)))
        .collect()
}

/// Waits until the transfers are those that the pipeline knows of, and none is open.
fn agree(agent: &Agent, pipeline: &Pipeline) -> Result<Scrape> {
    let differences = |scrape: &Scrape| -> Result<Vec<String>> { Ok(pipeline.truth()?.differences(scrape)) };
    let scrape = agent.scrape_until(SETTLED, |scrape| {
        open(scrape) == 0.0 && differences(scrape).is_ok_and(|found| found.is_empty())
    })?;
    let differences = differences(&scrape)?;
    ensure!(
        differences.is_empty() && open(&scrape) == 0.0,
        "{} open, differences:\n{}\n{}",
        open(&scrape),
        differences.join("\n"),
        agent.log()
    );
    Ok(scrape)
}

fn nothing_lost(agent: &Agent) -> Result<()> {
    // These counters are copied every few seconds.
    std::thread::sleep(Duration::from_secs(5));
    let scrape = agent.scrape()?;
    let lost = scrape.sum("omnitap_events_lost_total", &[]);
    ensure!(lost == 0.0, "{lost} events were lost");
    Ok(())
}

#[test]
fn every_hop_with_size_labels_and_times() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let quick = [1, 100, 4096, 65_536, 1_000_003, 70].map(|bytes| json!({"bytes": bytes}));
    let slow = [
        json!({"bytes": 5000, "put_delay": 0.03, "get_delay": 0.01}),
        json!({"bytes": 5001, "put_delay": 0.005, "get_delay": 0.04}),
    ];
    let phases = json!([{"requests": [requests(40, 0.05, &quick), requests(10, 0.1, &slow)]}]);
    let mut pipeline = Pipeline::start(Options::omni("hops"), &scenario(&phases))?;
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("recording");
    let agent = Agent::start_as("record", &[&file.to_string_lossy()])?;
    found(&agent, &pipeline)?;
    pipeline.play()?;
    let scrape = agree(&agent, &pipeline)?;
    nothing_lost(&agent)?;

    let hops = pipeline.hops()?;
    let known: Vec<Hop> = hops.pairs().map(|(_, hop)| hop).collect();
    assert_eq!(known.len(), 40 * 6 + 10 * 2);
    assert_eq!((hops.puts.len(), hops.gets.len()), (known.len(), known.len()));
    let model = pipeline.options().model.clone();
    for replica in ["0", "1"] {
        let edge = [
            ("model_name", model.as_str()),
            ("from_stage", "0"),
            ("from_replica", "0"),
            ("to_stage", "1"),
            ("to_replica", replica),
        ];
        assert_eq!(scrape.get(&format!("{SIZE}_count"), &edge), Some(130.0));
    }
    for family in [SIZE, TX, RX, IN_FLIGHT] {
        assert_eq!(skipped(&scrape, family), BTreeMap::new(), "{family}");
    }
    for (family, truth) in [
        (TX, known.iter().map(Hop::tx).sum::<f64>()),
        (RX, known.iter().map(Hop::rx).sum()),
        (IN_FLIGHT, known.iter().map(Hop::in_flight).sum()),
    ] {
        let labels = [("model_name", model.as_str())];
        let measured = scrape.sum(&format!("{family}_sum"), &labels);
        let count = scrape.sum(&format!("{family}_count"), &labels);
        println!(
            "{family}: {count} hops, mean {:.3} ms, truth {:.3} ms",
            measured / count * 1e3,
            truth / count * 1e3
        );
        // A process that is put aside between the call and its own clock is rare.
        ensure!(
            (measured - truth).abs() < 0.002 * count,
            "{family}: {measured} s, truth {truth} s"
        );
    }
    agent.stop()?;
    compare(&seen(&file, &hops)?, &hops)
}

/// What the agent saw of the hops in a recording.
fn seen(file: &std::path::Path, known: &Hops) -> Result<Hops> {
    let mut hops = Hops::default();
    for entry in Entries::new(File::open(file)?)? {
        let entry = entry?;
        let Item::Shm(shm) = entry.item else { continue };
        if !known.puts.contains_key(&shm.name) {
            continue;
        }
        let end = |size, start| End {
            size,
            start,
            done: entry.t,
            place: Place { stage: 0, replica: 0 },
        };
        match shm.what {
            ShmWhat::Put { size, start_ns } => hops.puts.insert(shm.name, end(size, start_ns)),
            ShmWhat::Get { start_ns } => hops.gets.insert(shm.name, end(0, start_ns)),
            ShmWhat::Unlinked => continue,
        };
    }
    Ok(hops)
}

/// Prints how far off each hop's times are.
fn compare(seen: &Hops, known: &Hops) -> Result<()> {
    type Value = fn(&Hop) -> f64;
    let seen: BTreeMap<&str, Hop> = seen.pairs().collect();
    let values: [(&str, Value); 4] = [
        ("tx", Hop::tx),
        ("rx", Hop::rx),
        ("in flight", Hop::in_flight),
        ("put done to get done", |hop| seconds(hop.put.done, hop.get.done)),
    ];
    for (name, value) in values {
        let mut off = Vec::new();
        for (key, hop) in known.pairs() {
            let seen = seen.get(key).with_context(|| format!("{key} was not seen"))?;
            assert_eq!(seen.put.size, hop.put.size);
            off.push((value(seen) - value(&hop)).abs() * 1e3);
        }
        off.sort_by(f64::total_cmp);
        let at = |part: usize| {
            off.get((off.len() * part / 100).min(off.len() - 1))
                .copied()
                .unwrap_or(f64::NAN)
        };
        println!(
            "{name}: off by {:.4} ms at the median, {:.4} ms at p99, {:.4} ms at most ({} hops)",
            at(50),
            at(99),
            at(100),
            off.len()
        );
    }
    Ok(())
}

#[test]
fn what_is_not_taken_and_what_is_no_transfer() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let payloads = [
        json!({"bytes": 1000, "foreign": true}),
        json!({"bytes": 2000, "taken": false}),
        json!({"bytes": 3000}),
    ];
    let phases = json!([{"requests": [requests(8, 0.05, &payloads)]}]);
    let mut pipeline = Pipeline::start(Options::omni("alone"), &scenario(&phases))?;
    let agent = Agent::start(&[])?;
    found(&agent, &pipeline)?;
    pipeline.play()?;
    let scrape = agree(&agent, &pipeline)?;
    nothing_lost(&agent)?;
    let labels = [("model_name", pipeline.options().model.as_str())];
    assert_eq!(scrape.sum(&format!("{SIZE}_sum"), &labels), 8.0 * 4000.0);
    let never_taken = BTreeMap::from([("never_taken".to_owned(), 8.0)]);
    assert_eq!(skipped(&scrape, SIZE), never_taken);
    assert_eq!(skipped(&scrape, TX), never_taken);
    assert_eq!(skipped(&scrape, RX), BTreeMap::new());
    // Of other software's segments the kernel hands on those alone that are made with a lock held.
    let foreign = agent
        .scrape()?
        .sum("omnitap_events_received_total", &[("kind", "shm_foreign")]);
    assert!(foreign >= 8.0, "{foreign}");
    Ok(())
}

#[test]
fn killed_in_mid_transfer() -> Result<()> {
    let Some(_turn) = omnitap_tests::privileged()? else {
        return Ok(());
    };
    let rounds: u32 = match std::env::var(ROUNDS) {
        Ok(rounds) => rounds.parse().context(ROUNDS)?,
        Err(_) => 20,
    };
    // Payloads of ever other sizes, each in the hands of its sender and its receiver for a while. The receivers fall
    // behind, so that some payloads lie there.
    let payloads: Vec<Value> = (0..8)
        .map(|n| json!({"bytes": 1000 + n, "put_delay": 0.006, "get_delay": 0.02}))
        .collect();
    let phases: Vec<Value> = (0..rounds)
        .map(|round| {
            // Sender, receiver 0, receiver 1 in turn, each time at another moment.
            let (stage, replica) = [(0, 0), (1, 0), (1, 1)][(round % 3) as usize];
            let at = 0.06 + 0.0037 * f64::from(round % 40);
            json!({
                "requests": [requests(4, 0.01, &payloads)],
                "acts": [
                    {"do": "kill", "stage": stage, "replica": replica, "at": at},
                    {"do": "start", "stage": stage, "replica": replica, "at": at + 0.1}
                ]
            })
        })
        .collect();
    let mut pipeline = Pipeline::start(Options::omni("killed"), &scenario(&json!(phases)))?;
    let agent = Agent::start(&[])?;
    let resident = |scrape: &Scrape| scrape.sum("omnitap_resident_memory_bytes", &[]) / f64::from(1 << 20);
    let mut memory = Vec::new();
    for _ in 0..rounds {
        found(&agent, &pipeline)?;
        pipeline.play()?;
        memory.push(resident(&agent.scrape()?));
    }
    let scrape = agent.scrape_until(SENDER_GONE, |scrape| open(scrape) == 0.0)?;
    let left = open(&scrape);
    println!(
        "{rounds} rounds: {left} open, resident {:.1?} MiB, skipped {:?}, rx {:?}",
        memory,
        skipped(&scrape, SIZE),
        skipped(&scrape, RX)
    );
    let hops = pipeline.hops()?;
    bounded(&scrape, &pipeline, &hops, rounds)?;
    // Where the receiver is killed, the sender has put what nobody will take: given up with the pipeline, or after
    // five minutes.
    let untaken = hops
        .puts
        .keys()
        .filter(|key| !hops.gets.contains_key(*key))
        .count();
    ensure!(left <= untaken as f64, "{left} open, {untaken} were not taken");
    pipeline.stop()?;
    let scrape = agent.scrape_until(SETTLED, |scrape| open(scrape) == 0.0)?;
    assert_eq!(open(&scrape), 0.0);
    nothing_lost(&agent)?;
    // The first rounds fill what is kept; a leak goes on.
    let (early, late) = (memory[memory.len() / 4], resident(&scrape));
    ensure!(
        late < early + 4.0,
        "resident memory went from {early:.1} to {late:.1} MiB"
    );
    Ok(())
}

/// Each edge has the hops that the pipeline knows both ends of, and at most those more whose end was not written down
/// when its process was killed: one each time.
fn bounded(scrape: &Scrape, pipeline: &Pipeline, hops: &Hops, rounds: u32) -> Result<()> {
    let mut more = 0.0;
    for replica in 0..2 {
        let name = replica.to_string();
        let edge = [
            ("model_name", pipeline.options().model.as_str()),
            ("from_stage", "0"),
            ("from_replica", "0"),
            ("to_stage", "1"),
            ("to_replica", name.as_str()),
        ];
        let known: Vec<Hop> = hops
            .pairs()
            .map(|(_, hop)| hop)
            .filter(|hop| hop.get.place.replica == replica)
            .collect();
        let count = known.len() as f64;
        let bytes: f64 = known.iter().map(|hop| hop.put.size as f64).sum();
        let of = |family: &str, part: &str| scrape.sum(&format!("{family}_{part}"), &edge);
        let extra = of(SIZE, "count") - count;
        let extra_bytes = of(SIZE, "sum") - bytes;
        println!("to replica {replica}: {count} hops known, {extra} more seen");
        ensure!(
            extra >= 0.0,
            "{extra} hops more than {count} to replica {replica}"
        );
        ensure!(
            extra_bytes >= 1000.0 * extra && extra_bytes <= 1007.0 * extra,
            "{extra_bytes} bytes in {extra} hops"
        );
        for (family, value) in [
            (TX, known.iter().map(Hop::tx).sum::<f64>()),
            (IN_FLIGHT, known.iter().map(Hop::in_flight).sum()),
        ] {
            let off = of(family, "sum") - value;
            // A payload that was paired with another one's get would be off by the time between the two.
            ensure!(
                off.abs() < 0.002 * count + 0.1 * extra,
                "{family} to replica {replica}: off by {off} s in {count} hops"
            );
        }
        more += extra;
    }
    ensure!(
        more <= f64::from(rounds),
        "{more} hops that the pipeline does not know"
    );
    Ok(())
}
