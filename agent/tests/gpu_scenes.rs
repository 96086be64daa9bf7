//! GPUs as NVML shows them, from no library to instances that come and go: a library of our own plays NVML, loaded as
//! the driver's is, and the exposition after each scene is pinned as golden text.
#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

use std::{
    fmt::Write as _,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    sync::{LazyLock, mpsc::sync_channel},
    time::Duration,
};

use omnitap::{
    gpu::{
        sample::State,
        sampler::{Members, Sampler, SamplerThread, Settings},
    },
    host::identity::{Change, Flavor, Pipeline, PipelineId, Process, ProcessKey, Role, Versions},
    metrics::{registry::Limits, text::Format},
    observer::Observer,
    pipeline::tracker,
    record::{Entries, Entry, Item, Writer},
};
use tempfile::TempDir;

const GIB: u64 = 1 << 30;
const SECOND: u64 = 1_000_000_000;

/// The library that plays NVML, built once: the present one, and one of an old driver.
fn library(old: bool) -> &'static Path {
    static BUILT: LazyLock<(TempDir, PathBuf, PathBuf)> = LazyLock::new(|| {
        let folder = tempfile::tempdir().unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/nvml/nvml.c");
        let build = |name: &str, flags: &[&str]| {
            let library = folder.path().join(name);
            let status = Command::new("cc")
                .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror"])
                .args(flags)
                .arg("-o")
                .args([&library, &source])
                .status();
            assert!(
                status.as_ref().is_ok_and(std::process::ExitStatus::success),
                "nvml.c does not build ({status:?}): it needs a C compiler"
            );
            library
        };
        let (new, old) = (build("new.so", &[]), build("old.so", &["-DOLD_DRIVER"]));
        (folder, new, old)
    });
    if old { &BUILT.2 } else { &BUILT.1 }
}

/// A host with a driver, processes and the agent's parts, on a clock of its own.
struct Stage {
    folder: TempDir,
    members: Members,
    sampler: Sampler,
    observer: Observer,
    now: u64,
    told: String,
}

impl Stage {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let members = Members::default();
        let sampler = Sampler::new(settings(folder.path()), members.clone());
        let limits = Limits {
            max_series: 50_000,
            retention: Duration::from_mins(15),
        };
        let mut stage = Self {
            folder,
            members,
            sampler,
            observer: Observer::new(limits, tracker::Limits::default()),
            now: SECOND,
            told: String::new(),
        };
        stage.pipeline(1, Flavor::Omni, "talker");
        stage
    }

    fn pipeline(&mut self, id: u32, flavor: Flavor, model: &str) {
        let root = ProcessKey {
            pid: id * 1000,
            start_ticks: 1,
        };
        self.change(&Change::Pipeline(Pipeline {
            id: PipelineId(id),
            flavor,
            model: Some(model.to_owned()),
            served_model: Some(model.to_owned()),
            versions: Versions::default(),
            max_model_len: None,
            root,
        }));
        self.process(id, id * 1000, 1, Role::ApiServer);
    }

    fn change(&mut self, change: &Change) {
        self.observer.change(change, self.now);
    }

    /// A process that the agent watches, without a GPU.
    fn process(&mut self, pipeline: u32, pid: u32, parent: u32, role: Role) {
        self.stranger(pid, parent);
        self.members.insert(pid);
        self.change(&Change::Process(Process {
            key: ProcessKey { pid, start_ticks: 1 },
            parent,
            role,
            pipeline: PipelineId(pipeline),
            container: None,
        }));
    }

    fn llm(&mut self, pid: u32, stage: u32, replica: u32) {
        let (stage, replica) = (Some(stage), Some(replica));
        self.process(1, pid, 1000, Role::LlmStage { stage, replica });
        self.opens_gpu(pid);
    }

    /// A process that the agent does not watch.
    fn stranger(&mut self, pid: u32, parent: u32) {
        let folder = self.proc(pid);
        fs::create_dir_all(folder.join("fd")).unwrap();
        fs::write(
            folder.join("stat"),
            format!("{pid} (python3) S {parent} 1 1 0 -1"),
        )
        .unwrap();
    }

    fn opens_gpu(&mut self, pid: u32) {
        symlink("/dev/nvidia0", self.proc(pid).join("fd/9")).unwrap();
    }

    fn ends(&mut self, pid: u32) {
        fs::remove_dir_all(self.proc(pid)).unwrap();
        self.members.remove(pid);
        self.change(&Change::ProcessGone(ProcessKey { pid, start_ticks: 1 }));
    }

    fn proc(&self, pid: u32) -> PathBuf {
        self.folder.path().join(format!("proc/{pid}"))
    }

    /// Puts the driver's library where the agent looks for it.
    fn install(&mut self, old: bool) {
        let place = driver(self.folder.path());
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        // The copy goes to a new file: one that is loaded must not change.
        let _ = fs::remove_file(&place);
        fs::copy(library(old), &place).unwrap();
    }

    fn script(&mut self, script: &str) {
        write_script(self.folder.path(), script);
    }

    /// Lets time pass, second by second.
    fn pass(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now += SECOND;
            let (observer, now) = (&mut self.observer, self.now);
            self.sampler.step(Duration::from_nanos(now), &mut |sample| {
                observer.gpu(&sample, now);
            });
            self.observer.tick(self.now);
        }
    }

    /// Time passes while the sampler hangs in a call.
    fn hang(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.now += SECOND;
            self.observer.tick(self.now);
        }
    }

    /// Ends a scene: notes what is exposed.
    fn scene(&mut self, title: &str) {
        let _ = write!(self.told, "\n== {title}\n{}", exposed(&self.observer));
    }
}

fn settings(folder: &Path) -> Settings {
    Settings {
        interval: Duration::from_secs(1),
        libraries: vec![driver(folder)],
        proc_root: folder.join("proc"),
    }
}

fn driver(folder: &Path) -> PathBuf {
    folder.join("driver/libnvidia-ml.so.1")
}

/// Replaced as a whole: the library may be reading it.
fn write_script(folder: &Path, script: &str) {
    let place = driver(folder).with_file_name("nvml.script");
    let partial = place.with_extension("partial");
    fs::write(&partial, script).unwrap();
    fs::rename(&partial, &place).unwrap();
}

/// Sample lines that tell of GPUs.
fn exposed(observer: &Observer) -> String {
    let mut out = Vec::new();
    observer.exposition().render(&mut out, Format::Text);
    let text = String::from_utf8(out).unwrap();
    let is_told = |line: &&str| {
        line.starts_with("omnitap_gpu_")
            || line.starts_with("omnitap_peak_memory_source")
            || line.starts_with("vllm_omni:peak_memory_mb")
            || line.starts_with("omnitap_samples_skipped_total{family=\"omnitap_gpu")
    };
    text.lines()
        .filter(is_told)
        .fold(String::new(), |told, line| told + line + "\n")
}

const GPU0: &str = "gpu 0 uuid=GPU-aaaa name=H100 used=21474836480 total=85899345920 util=37 power=310500 temp=61 \
                    corrected=3 uncorrected=1 mig=0 accounting=0\n";
const GPU1: &str = "gpu 1 uuid=GPU-bbbb name=H100 used=10737418240 total=85899345920 util=0 power=70000 temp=40 \
                    corrected=0 uncorrected=0 mig=0 accounting=0\n";

fn on(gpu: &str, pid: u32, gib: u64) -> String {
    format!("process {gpu} {pid} used={}\n", gib * GIB)
}

#[test]
fn driver_and_library() {
    let mut stage = Stage::new();
    stage.llm(1010, 0, 0);
    stage.pass(2);
    stage.scene("no library on the host");

    stage.install(false);
    stage.script("error nvmlInit_v2 9\n");
    stage.pass(60);
    stage.scene("a library is found within a minute, but the driver is not loaded");

    stage.script("error nvmlInit_v2 18\n");
    stage.pass(60);
    stage.scene("library and driver of different versions");

    stage.script("error nvmlInit_v2 4\n");
    stage.pass(60);
    stage.scene("the driver refuses the agent");

    stage.script("driver 550.54.15\n");
    stage.pass(60);
    stage.scene("a driver without GPUs");

    stage.script(&format!("{GPU0}{}", on("0", 1010, 20)));
    stage.pass(60);
    stage.scene("one GPU, one stage");

    stage.script("error nvmlDeviceGetCount_v2 1\n");
    stage.pass(1);
    stage.scene("the driver is taken away");

    stage.script(&format!("driver 560.1\n{GPU0}{}", on("0", 1010, 5)));
    stage.pass(60);
    stage.scene("a newer driver is loaded; the process lives on, and so does its peak");

    stage.ends(1010);
    stage.pass(11);
    stage.scene("the last process with a GPU ends: NVML is closed");

    stage.llm(1011, 0, 0);
    stage.script(&format!("{GPU0}{}", on("0", 1011, 2)));
    stage.pass(6);
    stage.scene("its successor starts with a peak of its own");

    stage.hang(5);
    stage.scene("a call hangs for five seconds: shown as age");
    stage.hang(1);
    stage.scene("and longer: gauges fall away");
    stage.pass(1);
    stage.scene("the call has returned");
    insta::assert_snapshot!(stage.told);
}

#[test]
fn an_old_driver() {
    let mut stage = Stage::new();
    stage.llm(1010, 0, 0);
    stage.install(true);
    stage.script(&format!("driver 470.256.02\n{GPU0}{}", on("0", 1010, 20)));
    stage.pass(2);
    stage.scene("a driver before 510 has processes under an older name, and no such memory call");
    insta::assert_snapshot!(stage.told);
}

#[test]
fn stages_and_processes() {
    let mut stage = Stage::new();
    stage.install(false);
    stage.script(&format!("{GPU0}{GPU1}"));
    stage.pass(6);
    stage.scene("no watched process uses a GPU: NVML is not opened");

    stage.llm(1010, 0, 0);
    stage.llm(1020, 1, 0);
    stage.script(&format!("{GPU0}{GPU1}{}{}", on("0", 1010, 20), on("1", 1020, 10)));
    stage.pass(6);
    stage.scene("two stages, a GPU each");

    stage.script(&format!("{GPU0}{}{}", on("0", 1010, 12), on("0", 1020, 8)));
    stage.pass(1);
    stage.scene("two stages share a GPU, the other GPU is gone: no owner, lower use, the same peaks");

    stage.process(1, 1021, 1020, Role::Worker);
    stage.process(1, 1022, 1020, Role::Worker);
    // A helper of a worker has no role of its own.
    stage.stranger(1023, 1022);
    stage.script(&format!(
        "{GPU0}{GPU1}{}{}{}",
        on("0", 1021, 30),
        on("1", 1022, 31),
        on("1", 1023, 1)
    ));
    stage.pass(1);
    stage.scene("workers and their children count for their stage; the peak is that of one GPU");

    stage.stranger(77, 1);
    stage.script(&format!("{GPU0}{}{}", on("0", 1021, 30), on("0", 77, 5)));
    stage.pass(3);
    stage.scene("a process of somebody else shares the GPU: counted once");

    stage.script(&format!("{GPU0}{}{}", on("0", 1021, 30), on("0", 4242, 5)));
    stage.pass(3);
    stage.scene("a process id that this host does not have");

    let unknown = Role::DiffusionStage {
        stage: None,
        replica: None,
    };
    stage.process(1, 1030, 1000, unknown);
    stage.script(&format!("{GPU0}{}", on("0", 1030, 9)));
    stage.pass(1);
    stage.scene("a stage that is not known yet");
    let known = Role::DiffusionStage {
        stage: Some(2),
        replica: None,
    };
    stage.process(1, 1030, 1000, known);
    stage.pass(1);
    stage.scene("and then is; its replica stays unknown");

    stage.llm(1040, 1, 1);
    stage.script(&format!("{GPU0}{GPU1}{}{}", on("0", 1020, 8), on("1", 1040, 60)));
    stage.pass(1);
    stage.scene("a second replica: the stage's peak is the highest");
    stage.ends(1040);
    stage.script(&format!("{GPU0}{}", on("0", 1020, 8)));
    stage.pass(1);
    stage.scene("the replica ends, its peak goes with it");

    for pid in [1021, 1022, 1010, 1020, 1030, 1000] {
        stage.ends(pid);
    }
    stage.change(&Change::PipelineGone(PipelineId(1)));
    stage.pipeline(2, Flavor::Omni, "painter");
    stage.process(2, 2001, 2000, Role::Worker);
    stage.opens_gpu(2001);
    stage.script(&format!("{GPU0}{}", on("0", 2001, 24)));
    stage.pass(11);
    stage.scene("a diffusion pipeline in its API server is stage 0");

    stage.pipeline(3, Flavor::Vllm, "plain");
    let core = Role::LlmStage {
        stage: Some(0),
        replica: Some(0),
    };
    stage.process(3, 3001, 3000, core);
    stage.script(&format!("{GPU0}{}", on("0", 3001, 24)));
    stage.pass(1);
    stage.scene("plain vLLM has no family for the peak");
    insta::assert_snapshot!(stage.told);
}

#[test]
fn fields_that_fail() {
    let mut stage = Stage::new();
    stage.llm(1010, 0, 0);
    stage.install(false);
    stage.script(&format!("{GPU0}process 0 1010\n"));
    stage.pass(1);
    stage.scene("the driver does not tell the memory of a process");

    stage.script("gpu 0 uuid=GPU-cccc name=GB10 used=5 total=9\nprocess 0 1010 used=1073741824\n");
    stage.pass(2);
    stage.scene("an integrated GPU: no utilisation, power, temperature, ECC, MIG, accounting; asked once");
    stage.pass(60);
    stage.scene("and once more after a minute");

    let all = [
        "UUID",
        "Name",
        "MemoryInfo_v2",
        "UtilizationRates",
        "PowerUsage",
        "Temperature",
        "TotalEccErrors",
        "MigMode",
        "ComputeRunningProcesses_v3",
        "AccountingMode",
    ];
    let failing = all.iter().fold(String::new(), |script, call| {
        script + &format!("error nvmlDeviceGet{call} 999 0\n")
    });
    stage.script(&format!("{GPU0}{GPU1}{failing}{}", on("1", 1010, 3)));
    stage.pass(1);
    stage.scene("every call fails for one GPU, the other is whole");

    stage.script(&format!("{GPU0}{GPU1}{}", on("1", 1010, 3)));
    stage.pass(1);
    stage.scene("all is well again at once");

    stage.script(&format!(
        "{GPU0}{GPU1}error nvmlDeviceGetHandleByIndex_v2 15 1\n{}",
        on("0", 1010, 4)
    ));
    stage.pass(1);
    stage.scene("a GPU falls off the bus");
    stage.script(&format!("{GPU0}{GPU1}{}", on("0", 1010, 4)));
    stage.pass(1);
    stage.scene("and is reset");

    let accounted = GPU0.replace("accounting=0", "accounting=1");
    stage.script(&format!(
        "{accounted}process 0 1010 used={} peak={}\n",
        2 * GIB,
        70 * GIB
    ));
    stage.pass(1);
    stage.scene("accounting mode knows of a peak between two looks");
    stage.script(&format!("{accounted}process 0 1010 used={}\n", 2 * GIB));
    stage.pass(1);
    stage.scene("a process without an account");
    insta::assert_snapshot!(stage.told);
}

#[test]
fn instances_come_and_go() {
    let mut stage = Stage::new();
    stage.llm(1010, 0, 0);
    stage.llm(1020, 1, 0);
    stage.install(false);
    stage.script(&format!("{GPU0}{}", on("0", 1010, 20)));
    stage.pass(1);
    stage.scene("a whole GPU");

    // In MIG mode the whole GPU has no utilisation.
    let divided = GPU0.replace("mig=0", "mig=1").replace("util=37 ", "");
    stage.script(&divided);
    stage.pass(1);
    stage.scene("MIG mode on, no instance yet");

    let first = "instance 0 0 uuid=MIG-1111 name=H100-3g used=1073741824 total=42949672960\n";
    let second = "instance 0 2 uuid=MIG-2222 name=H100-1g used=536870912 total=10737418240\n";
    stage.script(&format!(
        "{divided}{first}{second}{}{}",
        on("0:0", 1010, 1),
        on("0:2", 1020, 2)
    ));
    stage.pass(1);
    stage.scene("two instances, a stage each");

    stage.script(&format!("{divided}{second}{}", on("0:2", 1020, 3)));
    stage.pass(1);
    stage.scene("one instance is destroyed");

    stage.script(&format!(
        "{divided}{second}error nvmlDeviceGetMigDeviceHandleByIndex 999\n"
    ));
    stage.pass(1);
    stage.scene("instances can't be listed");

    stage.script(&format!("{GPU0}{}", on("0", 1020, 4)));
    stage.pass(1);
    stage.scene("MIG mode off");
    insta::assert_snapshot!(stage.told);
}

#[test]
fn a_recording_gives_the_same_text() {
    let mut stage = Stage::new();
    stage.llm(1010, 0, 0);
    stage.install(false);
    stage.script(&format!("{GPU0}{}", on("0", 1010, 20)));
    let mut writer = Writer::new(Vec::new(), true).unwrap();
    let mut samples = Vec::new();
    stage
        .sampler
        .step(Duration::from_secs(9), &mut |sample| samples.push(sample));
    for sample in samples {
        stage.observer.gpu(&sample, 9 * SECOND);
        writer
            .entry(&Entry {
                t: 9 * SECOND,
                item: Item::Gpu(sample),
            })
            .unwrap();
    }
    let live = exposed(&stage.observer);
    assert!(
        live.contains("vllm_omni:peak_memory_mb{model_name=\"talker\",stage=\"0\"} 20480.0"),
        "{live}"
    );

    let mut again = Stage::new();
    again.llm(1010, 0, 0);
    for entry in Entries::new(std::io::Cursor::new(writer.finish().unwrap())).unwrap() {
        again.observer.replay(&entry.unwrap());
    }
    assert_eq!(exposed(&again.observer), live);
}

#[test]
fn a_call_that_hangs_holds_up_its_thread_alone() {
    let mut stage = Stage::new();
    stage.llm(1010, 0, 0);
    stage.install(false);
    let healthy = format!("{GPU0}{}", on("0", 1010, 20));
    stage.script(&healthy);
    let folder = stage.folder.path();
    let mut settings = settings(folder);
    settings.interval = Duration::from_millis(100);
    let (out, samples) = sync_channel(1);
    let thread = SamplerThread::start(settings, stage.members.clone(), out).unwrap();
    let wait = |state| {
        while samples.recv_timeout(Duration::from_mins(1)).unwrap().state != state {}
    };
    wait(State::Ok);
    write_script(folder, &format!("{healthy}hang nvmlDeviceGetPowerUsage\n"));
    // Far longer than a look takes: the call hangs.
    while samples.recv_timeout(Duration::from_secs(2)).is_ok() {}
    write_script(folder, &healthy);
    wait(State::Ok);
    write_script(folder, &format!("{healthy}hang nvmlDeviceGetPowerUsage\n"));
    while samples.recv_timeout(Duration::from_secs(2)).is_ok() {}
    // Must come back, although the call does not.
    drop(thread);
    write_script(folder, &healthy);
}
