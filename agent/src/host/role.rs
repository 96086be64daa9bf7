//! What a process says of itself: its title or its command line, read without any other knowledge.
//!
//! Everything here is text that the process chose, so nothing of it is trusted further than to decide whom to
//! watch and what to call it. Ancestry and mapped libraries decide the rest ([`super::pipelines`]).
//!
//! A title (`setproctitle`) replaces the whole command line, and its prefix (`VLLM` by default) comes from the
//! environment variable `VLLM_PROCESS_NAME_PREFIX`, so it can be anything (docs/wire.md section "Processes").

/// What a process tells by its command line alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hint {
    /// An API server, a launcher of API workers or a headless launcher, by its argv.
    Server(Serve),
    /// `VLLM::APIServer_{i}`, and `VLLM::APIServer_DP{i}` below a data-parallel supervisor.
    ApiWorker {
        /// Client index, or data-parallel rank.
        index: u32,
    },
    /// `VLLM::EngineCore[_DP{n}]`: an engine core of plain vLLM, or an LLM stage of vLLM-Omni 0.18.
    EngineCore {
        /// Data-parallel rank, 0 without one.
        rank: u32,
    },
    /// `VLLM::StageEngineCoreProc...`: an LLM stage of vLLM-Omni from 0.20 on.
    StageCore {
        /// Stage id. vLLM-Omni 0.20 puts none into the title, later ones write `noid` where they know none.
        stage: Option<u32>,
        /// Replica id. Data-parallel ranks of one replica share it.
        replica: Option<u32>,
    },
    /// `VLLM::Worker...`
    Worker,
    /// `VLLM::DPCoordinator`
    DpCoordinator,
    /// `vLLM-Omni::DiffusionWorker...`: a worker process, or the process in which a diffusion engine with one
    /// device runs its worker: the diffusion stage, or the API server itself.
    DiffusionWorker {
        /// Whether the title names a rank. An engine with one device has none to name.
        ranked: bool,
    },
    /// A child of Python's `multiprocessing` that has no title, or none yet.
    Spawned,
    /// None of these.
    Other,
}

/// What the command line of a server says. Values from a `--config` file are not seen: they stay `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Serve {
    /// The model argument as given.
    pub model: Option<String>,
    /// The first of `--served-model-name`.
    pub served_model: Option<String>,
    /// `--max-model-len` in tokens, where it is a number.
    pub max_model_len: Option<u32>,
    /// `--headless`: engines without an API server.
    pub headless: bool,
    /// `--stage-id`: the one stage whose replicas this server starts.
    pub stage: Option<u32>,
    /// `--omni`. `vllm-omni serve` without it hands over to plain vLLM, so the program's name decides nothing.
    pub omni: bool,
}

/// Names that a label or a status page may carry: longer ones are no model name.
const MAX_NAME: usize = 512;

/// Options without a value, as far as they matter to find a model argument behind them.
const FLAGS: &[&str] = &[
    "--omni",
    "--headless",
    "--enforce-eager",
    "--trust-remote-code",
    "--log-stats",
    "--async-chunk",
];
/// Beginnings of further options without a value.
const FLAG_PREFIXES: &[&str] = &["--enable-", "--disable-", "--no-"];
/// Options that take any number of values.
const MANY: &[&str] = &[
    "--served-model-name",
    "--lora-modules",
    "--api-key",
    "--middleware",
    "--cudagraph-capture-sizes",
];

/// Reads a command line (`/proc/<pid>/cmdline` split at NUL, empty parts left out).
#[must_use]
pub fn classify(args: &[String]) -> Hint {
    match args {
        [] => Hint::Other,
        [title] => match title_hint(title) {
            // A title that repeats the argv (`setproctitle(getproctitle())`) has blanks where NULs were.
            Hint::Other if title.contains(char::is_whitespace) => {
                let args: Vec<String> = title.split_whitespace().map(str::to_owned).collect();
                server(&args).map_or(Hint::Other, Hint::Server)
            }
            hint => hint,
        },
        _ if is_spawned(args) => Hint::Spawned,
        _ => server(args).map_or(Hint::Other, Hint::Server),
    }
}

/// Reads a title of the form `prefix::name`.
fn title_hint(title: &str) -> Hint {
    let Some((_, name)) = title.rsplit_once("::") else {
        return Hint::Other;
    };
    let ranked = |base: &str, name: &str| -> Option<bool> {
        match name.strip_prefix(base)? {
            "" => Some(false),
            rest if rest.starts_with(['_', '-']) => Some(true),
            _ => None,
        }
    };
    if name == "DPCoordinator" {
        Hint::DpCoordinator
    } else if let Some(rest) = name.strip_prefix("StageEngineCoreProc") {
        stage_core(rest).unwrap_or(Hint::Other)
    } else if let Some(rest) = name.strip_prefix("EngineCore") {
        rank(rest).map_or(Hint::Other, |rank| Hint::EngineCore {
            rank: rank.unwrap_or(0),
        })
    } else if let Some(rest) = name.strip_prefix("APIServer_") {
        let digits = rest.strip_prefix("DP").unwrap_or(rest);
        number(digits).map_or(Hint::Other, |index| Hint::ApiWorker { index })
    } else if let Some(ranked) = ranked("DiffusionWorker", name) {
        Hint::DiffusionWorker { ranked }
    } else if ranked("Worker", name).is_some() {
        Hint::Worker
    } else {
        Hint::Other
    }
}

/// The part after `StageEngineCoreProc`: `[_(stage{S}|noid)_replica{R}][_DP{n}]`.
fn stage_core(rest: &str) -> Option<Hint> {
    let (stage, tail) = if let Some(tail) = rest.strip_prefix("_noid") {
        (None, tail)
    } else if let Some(tail) = rest.strip_prefix("_stage") {
        let (stage, tail) = tail.split_once('_')?;
        // The separator belongs to `_replica`.
        return replica(Some(number(stage)?), tail);
    } else {
        rank(rest)?;
        return Some(Hint::StageCore {
            stage: None,
            replica: None,
        });
    };
    replica(stage, tail.strip_prefix('_')?)
}

/// `replica{R}[_DP{n}]`; a negative replica id stands for one that is not assigned.
fn replica(stage: Option<u32>, text: &str) -> Option<Hint> {
    let text = text.strip_prefix("replica")?;
    let end = text.find('_').unwrap_or(text.len());
    let (id, tail) = text.split_at(end);
    rank(tail)?;
    let replica = if let Some(negative) = id.strip_prefix('-') {
        number(negative)?;
        None
    } else {
        Some(number(id)?)
    };
    Some(Hint::StageCore { stage, replica })
}

/// `[_DP{n}]` and nothing else.
#[expect(clippy::option_option, reason = "no rank is a valid title, garbage is none")]
fn rank(text: &str) -> Option<Option<u32>> {
    if text.is_empty() {
        Some(None)
    } else {
        number(text.strip_prefix("_DP")?).map(Some)
    }
}

fn number(digits: &str) -> Option<u32> {
    if digits.bytes().all(|b| b.is_ascii_digit()) {
        digits.parse().ok()
    } else {
        None
    }
}

/// `python -c "from multiprocessing.spawn import spawn_main; spawn_main(...)" --multiprocessing-fork`. The
/// resource tracker and the fork server of the same package run other code.
fn is_spawned(args: &[String]) -> bool {
    is_python(base_name(args.first().map_or("", String::as_str)))
        && args
            .windows(2)
            .any(|pair| matches!(pair, [option, code] if option == "-c" && code.contains("spawn_main(")))
}

fn base_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

fn is_python(name: &str) -> bool {
    name.starts_with("python") || name.starts_with("pypy")
}

/// How a server can be started.
enum Program {
    /// `vllm` or `vllm-omni`, with a subcommand.
    Cli,
    /// A module that serves without a subcommand.
    ApiServer,
}

/// Reads an argv as that of a server; `None`: it is none.
fn server(args: &[String]) -> Option<Serve> {
    let (program, rest) = program(args)?;
    match program {
        Program::Cli => match rest.split_first() {
            Some((command, rest)) if command == "serve" => Some(options(rest)),
            _ => None,
        },
        Program::ApiServer => Some(options(rest)),
    }
}

/// Reads what can be read of the command line of a program of one's own that embeds an engine.
///
/// Only for a process that is known to talk to an engine core: any other argv would give nonsense.
#[must_use]
pub fn embedder(args: &[String]) -> Serve {
    let first = if let Some(serve) = args.iter().position(|arg| arg == "serve") {
        serve + 1
    } else {
        // Positional arguments of an unknown program are no model.
        args.iter()
            .position(|arg| arg.starts_with("--"))
            .unwrap_or(args.len())
    };
    options(args.get(first..).unwrap_or_default())
}

fn program(args: &[String]) -> Option<(Program, &[String])> {
    let (first, mut rest) = args.split_first()?;
    let first = base_name(first);
    if is_cli(first) {
        return Some((Program::Cli, rest));
    }
    if !is_python(first) {
        return None;
    }
    // The interpreter's own options end at the script, at `-m` or at `-c`.
    loop {
        let (arg, after) = rest.split_first()?;
        match arg.as_str() {
            "-m" => {
                let (module, after) = after.split_first()?;
                return Some((module_program(module)?, after));
            }
            "-X" | "-W" | "--check-hash-based-pycs" => rest = after.get(1..)?,
            "-c" => return None,
            option if option.starts_with('-') => rest = after,
            script if is_cli(base_name(script)) => return Some((Program::Cli, after)),
            script => {
                let module = script.strip_suffix(".py")?.replace('/', ".");
                let start = module
                    .rfind("vllm.entrypoints.")
                    .or_else(|| module.rfind("vllm_omni.entrypoints."))?;
                return Some((module_program(module.get(start..)?)?, after));
            }
        }
    }
}

fn is_cli(name: &str) -> bool {
    name == "vllm" || name == "vllm-omni"
}

fn module_program(module: &str) -> Option<Program> {
    let inner = module
        .strip_prefix("vllm.entrypoints.")
        .or_else(|| module.strip_prefix("vllm_omni.entrypoints."))?;
    if inner.starts_with("cli.main") {
        Some(Program::Cli)
    } else if inner
        .split('.')
        .any(|part| part == "api_server" || part == "grpc_server")
    {
        Some(Program::ApiServer)
    } else {
        None
    }
}

/// How many values the option before may still take.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Takes {
    None,
    One,
    Many,
}

/// Reads the options after the program and its subcommand. Of a repeated option the last counts, as in argparse.
fn options(args: &[String]) -> Serve {
    let mut serve = Serve::default();
    let mut by_option = None;
    let mut option = String::new();
    let mut takes = Takes::None;
    let mut only_positional = false;
    for arg in args {
        if !only_positional && arg == "--" {
            (only_positional, takes) = (true, Takes::None);
            continue;
        }
        if !only_positional && arg.starts_with('-') && arg.len() > 1 && !is_negative_number(arg) {
            let (name, value) = match arg.split_once('=') {
                Some((name, value)) => (name, Some(value)),
                None => (arg.as_str(), None),
            };
            option = option_name(name);
            takes = arity(&option);
            if option == "--omni" {
                serve.omni = true;
            } else if option == "--headless" {
                serve.headless = true;
            } else if option == "--served-model-name" {
                serve.served_model = None;
            }
            if let Some(value) = value {
                set(&mut serve, &mut by_option, &option, value);
                // Further values of a list may follow `--option=first`.
                if takes == Takes::One {
                    takes = Takes::None;
                }
            }
            continue;
        }
        match takes {
            Takes::None => {
                if serve.model.is_none() {
                    serve.model = name(arg);
                }
            }
            Takes::One => {
                set(&mut serve, &mut by_option, &option, arg);
                takes = Takes::None;
            }
            Takes::Many => set(&mut serve, &mut by_option, &option, arg),
        }
    }
    // `vllm serve` puts `--model` in the place of the positional argument.
    if by_option.is_some() {
        serve.model = by_option;
    }
    serve
}

fn set(serve: &mut Serve, by_option: &mut Option<String>, option: &str, value: &str) {
    match option {
        "--model" => *by_option = name(value),
        "--served-model-name" if serve.served_model.is_none() => serve.served_model = name(value),
        "--max-model-len" => serve.max_model_len = tokens(value),
        "--stage-id" => serve.stage = number(value),
        _ => {}
    }
}

/// A name fit for a label: neither empty nor absurdly long. What is not UTF-8 was replaced on reading.
fn name(value: &str) -> Option<String> {
    (!value.is_empty() && value.len() <= MAX_NAME).then(|| value.to_owned())
}

/// The parser takes underscores for dashes in names, up to the first dot (`--json_arg.key_1`).
fn option_name(name: &str) -> String {
    let end = name.find('.').unwrap_or(name.len());
    let (head, tail) = name.split_at(end);
    format!("{}{tail}", head.replace('_', "-"))
}

fn arity(option: &str) -> Takes {
    if FLAGS.contains(&option) || FLAG_PREFIXES.iter().any(|prefix| option.starts_with(prefix)) {
        Takes::None
    } else if MANY.contains(&option) {
        Takes::Many
    } else if option.starts_with("-O") && option.len() > 2 {
        // `-O3`: the value is part of it.
        Takes::None
    } else {
        Takes::One
    }
}

fn is_negative_number(arg: &str) -> bool {
    arg.strip_prefix('-')
        .is_some_and(|rest| rest.parse::<f64>().is_ok())
}

/// A count of tokens as vLLM reads it: `4096`, `4k` (4000), `4K` (4096), `25.6k`. `-1` and `auto` are no number.
fn tokens(value: &str) -> Option<u32> {
    let value = value.trim();
    if let Ok(plain) = value.parse::<u32>() {
        return Some(plain);
    }
    let (digits, unit) = value.split_at_checked(value.len().checked_sub(1)?)?;
    let exponent = match unit {
        "k" | "K" => 1,
        "m" | "M" => 2,
        "g" | "G" => 3,
        _ => return None,
    };
    if unit.bytes().all(|b| b.is_ascii_uppercase()) {
        digits
            .parse::<u32>()
            .ok()?
            .checked_mul(1024_u32.checked_pow(exponent)?)
    } else {
        decimal(digits, exponent * 3)
    }
}

/// `digits` with an optional fraction, times ten to the `shift`, cut to whole tokens.
fn decimal(digits: &str, shift: u32) -> Option<u32> {
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, ""));
    if whole.is_empty() || !whole.bytes().chain(fraction.bytes()).all(|b| b.is_ascii_digit()) {
        return None;
    }
    let whole = whole
        .parse::<u64>()
        .ok()?
        .checked_mul(10_u64.checked_pow(shift)?)?;
    let mut part = 0_u64;
    let mut fraction = fraction.bytes();
    for _ in 0..shift {
        part = part * 10 + fraction.next().map_or(0, |b| u64::from(b - b'0'));
    }
    u32::try_from(whole.checked_add(part)?).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn argv(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    const fn core(stage: Option<u32>, replica: Option<u32>) -> Hint {
        Hint::StageCore { stage, replica }
    }

    #[rstest]
    #[case::omni_0_30("VLLM::StageEngineCoreProc_stage0_replica0_DP0", core(Some(0), Some(0)))]
    #[case::omni_two_digits("VLLM::StageEngineCoreProc_stage12_replica34", core(Some(12), Some(34)))]
    #[case::omni_dp_ranks_share_the_replica(
        "VLLM::StageEngineCoreProc_stage1_replica2_DP7",
        core(Some(1), Some(2))
    )]
    #[case::omni_unknown_stage("VLLM::StageEngineCoreProc_noid_replica0_DP0", core(None, Some(0)))]
    #[case::omni_unassigned_replica("VLLM::StageEngineCoreProc_stage1_replica-1_DP0", core(Some(1), None))]
    #[case::omni_0_20("VLLM::StageEngineCoreProc_DP3", core(None, None))]
    #[case::omni_bare("VLLM::StageEngineCoreProc", core(None, None))]
    #[case::own_prefix("prod east::StageEngineCoreProc_stage0_replica1_DP0", core(Some(0), Some(1)))]
    #[case::prefix_with_colons("a::b::EngineCore_DP1", Hint::EngineCore { rank: 1 })]
    #[case::empty_prefix("::EngineCore", Hint::EngineCore { rank: 0 })]
    #[case::core("VLLM::EngineCore", Hint::EngineCore { rank: 0 })]
    #[case::core_dp("VLLM::EngineCore_DP11", Hint::EngineCore { rank: 11 })]
    #[case::api_worker("VLLM::APIServer_3", Hint::ApiWorker { index: 3 })]
    #[case::api_worker_of_dp_supervisor("VLLM::APIServer_DP1", Hint::ApiWorker { index: 1 })]
    #[case::worker("VLLM::Worker", Hint::Worker)]
    #[case::worker_ranks("VLLM::Worker_DP0_PP1_PCP0_TP3_DCP0_EP2", Hint::Worker)]
    #[case::coordinator("VLLM::DPCoordinator", Hint::DpCoordinator)]
    #[case::diffusion_one_device("vLLM-Omni::DiffusionWorker", Hint::DiffusionWorker { ranked: false })]
    #[case::diffusion_ranks("vLLM-Omni::DiffusionWorker_SP0_CFG1", Hint::DiffusionWorker { ranked: true })]
    #[case::diffusion_0_22("vLLM-Omni::DiffusionWorker-0", Hint::DiffusionWorker { ranked: true })]
    #[case::no_prefix("EngineCore", Hint::Other)]
    #[case::one_colon("VLLM:EngineCore", Hint::Other)]
    #[case::other_end("VLLM::EngineCore_DP", Hint::Other)]
    #[case::other_word("VLLM::EngineCoreX", Hint::Other)]
    #[case::sign_is_no_digit("VLLM::EngineCore_DP+1", Hint::Other)]
    #[case::number_too_large("VLLM::EngineCore_DP99999999999", Hint::Other)]
    #[case::stage_without_number("VLLM::StageEngineCoreProc_stage_replica0", Hint::Other)]
    #[case::stage_without_replica("VLLM::StageEngineCoreProc_stage0", Hint::Other)]
    #[case::trailing_text("VLLM::StageEngineCoreProc_stage0_replica0_DP0_x", Hint::Other)]
    #[case::workers_of_others("app::Workers", Hint::Other)]
    #[case::nothing_behind_the_prefix("VLLM::", Hint::Other)]
    fn reads_titles(#[case] title: &str, #[case] hint: Hint) {
        assert_eq!(classify(&[title.to_owned()]), hint);
    }

    #[test]
    fn a_title_with_more_arguments_is_none() {
        assert_eq!(classify(&argv("grep VLLM::EngineCore")), Hint::Other);
        assert_eq!(classify(&[]), Hint::Other);
    }

    #[rstest]
    #[case::spawned(&["/usr/bin/python3.12", "-c",
        "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)",
        "--multiprocessing-fork"], true)]
    #[case::interpreter_options(&["python", "-B", "-I", "-c",
        "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5, pipe_handle=7)",
        "--multiprocessing-fork"], true)]
    #[case::resource_tracker(&["python3", "-c", "from multiprocessing.resource_tracker import main;main(41)"], false)]
    #[case::fork_server(&["python3", "-c",
        "from multiprocessing.forkserver import main; main(3, 4, ['__main__'], **{})"], false)]
    #[case::an_editor(&["vim", "-c", "spawn_main("], false)]
    fn tells_spawned_children(#[case] args: &[&str], #[case] is: bool) {
        let args: Vec<String> = args.iter().map(|&arg| arg.to_owned()).collect();
        assert_eq!(classify(&args), if is { Hint::Spawned } else { Hint::Other });
    }

    #[rstest]
    #[case::script("/usr/local/bin/vllm serve m")]
    #[case::script_by_python("/opt/venv/bin/python3 /opt/venv/bin/vllm serve m")]
    #[case::interpreter_options("python3 -u -X faulthandler -W ignore /opt/venv/bin/vllm serve m")]
    #[case::module("python -m vllm.entrypoints.cli.main serve m")]
    #[case::server_module("python -m vllm.entrypoints.openai.api_server --model m")]
    #[case::server_module_equals("python3.12 -m vllm.entrypoints.openai.api_server --port 1 --model=m")]
    #[case::server_file("python3 /src/vllm/entrypoints/openai/api_server.py --model m")]
    #[case::newer_place("python3 -m vllm.entrypoints.launchers.api_server.entry --model m")]
    #[case::grpc("python3 -m vllm.entrypoints.grpc_server --model m")]
    #[case::title_repeats_argv("")]
    fn finds_servers(#[case] line: &str) {
        let args = match line {
            "" => vec!["/usr/bin/python3 /usr/bin/vllm serve m".to_owned()],
            line => argv(line),
        };
        let expected = Serve {
            model: Some("m".to_owned()),
            ..Serve::default()
        };
        assert_eq!(classify(&args), Hint::Server(expected));
    }

    #[rstest]
    #[case::shell("bash -c exec_vllm_serve_m")]
    #[case::uv("uv run vllm serve m")]
    #[case::editor("vim vllm serve m")]
    #[case::client("vllm chat m")]
    #[case::benchmark("vllm bench serve --model m")]
    #[case::no_subcommand("vllm")]
    #[case::other_script("python3 /app/main.py serve m")]
    #[case::other_module("python3 -m http.server")]
    #[case::python_alone("python3")]
    #[case::module_missing("python3 -m")]
    #[case::tool_of_the_package("python3 -m vllm.entrypoints.openai.run_batch --model m")]
    #[case::lookalike("vllm-router serve m")]
    fn leaves_others(#[case] line: &str) {
        assert_eq!(classify(&argv(line)), Hint::Other);
    }

    fn serve(line: &str) -> Serve {
        match classify(&argv(line)) {
            Hint::Server(serve) => serve,
            other => panic!("{line}: {other:?}"),
        }
    }

    #[rstest]
    #[case::first_of_several("vllm serve m --served-model-name a b c --port 1", Some("m"), Some("a"))]
    #[case::equals("vllm serve m --served-model-name=a", Some("m"), Some("a"))]
    #[case::equals_and_more("vllm serve m --served-model-name=a b", Some("m"), Some("a"))]
    #[case::underscores("vllm serve m --served_model_name a", Some("m"), Some("a"))]
    #[case::underscores_equals("vllm serve m --served_model_name=a_b", Some("m"), Some("a_b"))]
    #[case::last_counts(
        "vllm serve m --served-model-name a --served-model-name b",
        Some("m"),
        Some("b")
    )]
    #[case::model_option("vllm serve --port 1 --model org/m", Some("org/m"), None)]
    #[case::option_beats_position("vllm serve m --model n", Some("n"), None)]
    #[case::model_behind_values("vllm serve -tp 2 --port 8000 m", Some("m"), None)]
    #[case::model_behind_flags("vllm serve --omni --enable-prefix-caching --no-async m", Some("m"), None)]
    #[case::model_behind_equals("vllm serve --port=1 m", Some("m"), None)]
    #[case::model_behind_optimisation("vllm serve -O3 m", Some("m"), None)]
    #[case::model_behind_dashes("vllm serve --served-model-name a -- m", Some("m"), Some("a"))]
    #[case::negative_value("vllm serve --max-model-len -1 m", Some("m"), None)]
    #[case::by_config("vllm serve --config c.yaml", None, None)]
    #[case::by_config_with_model("vllm serve m --config c.yaml", Some("m"), None)]
    #[case::none("vllm serve", None, None)]
    #[case::json_values("vllm serve m --hf-overrides.a_b.model x --rope-scaling {}", Some("m"), None)]
    fn reads_names(#[case] line: &str, #[case] model: Option<&str>, #[case] served: Option<&str>) {
        let serve = serve(line);
        assert_eq!(
            (serve.model.as_deref(), serve.served_model.as_deref()),
            (model, served)
        );
    }

    #[rstest]
    #[case::plain("4096", Some(4096))]
    #[case::decimal_k("4k", Some(4000))]
    #[case::binary_k("4K", Some(4096))]
    #[case::fraction("25.6k", Some(25_600))]
    #[case::long_fraction("1.23456k", Some(1234))]
    #[case::decimal_m("1m", Some(1_000_000))]
    #[case::binary_m("1M", Some(1_048_576))]
    #[case::no_fraction_with_binary("1.5K", None)]
    #[case::auto("auto", None)]
    #[case::minus_one("-1", None)]
    #[case::too_large("5G", None)]
    #[case::unit_alone("k", None)]
    #[case::wide_character("4\u{212a}", None)]
    fn reads_lengths(#[case] value: &str, #[case] tokens: Option<u32>) {
        assert_eq!(
            serve(&format!("vllm serve m --max-model-len {value}")).max_model_len,
            tokens
        );
        assert_eq!(
            serve(&format!("vllm serve m --max_model_len={value}")).max_model_len,
            tokens
        );
    }

    #[test]
    fn reads_omni_and_headless() {
        let head = serve("python3 /venv/bin/vllm-omni serve org/m --omni --stage-id 0 --port 8091");
        assert!(head.omni && !head.headless);
        let replica = serve("vllm serve org/m --omni --stage-id 1 --headless --omni-dp-size-local 2");
        assert!(replica.omni && replica.headless);
        assert_eq!((head.stage, replica.stage), (Some(0), Some(1)));
        assert_eq!(replica.model.as_deref(), Some("org/m"));
        // Without --omni the program hands over to plain vLLM.
        assert!(!serve("vllm-omni serve org/m").omni);
    }

    #[test]
    fn reads_an_embedder() {
        let serve = embedder(&argv(
            "python3 /app/main.py serve org/m --omni --served-model-name x",
        ));
        assert_eq!(
            (serve.model.as_deref(), serve.served_model.as_deref()),
            (Some("org/m"), Some("x"))
        );
        assert!(serve.omni);
        let worker = embedder(&argv("python3 -m dynamo.vllm --model org/n --max-model-len 2K"));
        assert_eq!(
            (worker.model.as_deref(), worker.max_model_len),
            (Some("org/n"), Some(2048))
        );
        assert_eq!(embedder(&argv("python3 offline.py input.txt")), Serve::default());
    }

    #[test]
    fn refuses_absurd_names() {
        let long = "x".repeat(MAX_NAME + 1);
        assert_eq!(serve(&format!("vllm serve {long}")).model, None);
    }

    proptest! {
        #[test]
        fn takes_any_command_line(args in prop::collection::vec(".{0,30}", 0..12)) {
            let _ = classify(&args);
            let _ = embedder(&args);
        }

        #[test]
        fn takes_any_title(tail in "(StageEngineCoreProc|EngineCore|APIServer|Worker|DiffusionWorker)[_a-zA-Z0-9-]{0,30}") {
            let _ = classify(&[format!("VLLM::{tail}")]);
        }

        #[test]
        fn takes_any_options(args in prop::collection::vec("(--?[a-z_.=-]{0,20}|[a-z0-9.]{0,8})", 0..16)) {
            let mut line = argv("vllm serve");
            line.extend(args);
            prop_assert!(matches!(classify(&line), Hint::Server(_)));
        }

        #[test]
        fn any_stage_and_replica_come_through(stage: u32, replica: u32, dp: u32, prefix in "[^\\x00]{0,12}") {
            let title = format!("{prefix}::StageEngineCoreProc_stage{stage}_replica{replica}_DP{dp}");
            prop_assert_eq!(classify(&[title]), core(Some(stage), Some(replica)));
        }
    }
}
