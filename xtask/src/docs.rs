//! `cargo xtask docs`: what the documentation names is there: links and their headings, files, commands and their flags,
//! settings and families. Addresses on the web are not asked.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

use crate::setup;

/// Options of `cargo xtask docs`.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Folders of the repository: code that begins with one is taken for a file.
const FOLDERS: &[&str] = &[
    "agent/",
    "agent-ebpf/",
    "deploy/",
    "docs/",
    "tests/",
    "xtask/",
    ".ci/",
];
/// First parts of settings.
const SETTINGS: &[&str] = &["web", "log", "tap", "host", "pipeline", "metrics", "sources"];

/// Runs the task.
pub(crate) fn run(_: &Args) -> Result<()> {
    setup::run(setup::cargo().args(["build", "--quiet", "--package", "omnitap"]))?;
    let mut pages = BTreeMap::new();
    for name in ["README.md", "CHANGELOG.md"] {
        pages.insert(setup::root().join(name), Page::default());
    }
    for entry in fs::read_dir(setup::root().join("docs"))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "md") {
            pages.insert(path, Page::default());
        }
    }
    for (path, page) in &mut pages {
        *page = Page::read(&fs::read_to_string(path)?);
    }
    let mut known = Known::ask()?;
    let mut wrong = Vec::new();
    for (path, page) in &pages {
        let mut complain = |what: String| {
            let name = path.strip_prefix(setup::root()).unwrap_or(path);
            wrong.push(format!("{}: {what}", name.display()));
        };
        for link in &page.links {
            if let Some(reason) = broken(link, path, &pages) {
                complain(format!("link {link}: {reason}"));
            }
        }
        for code in &page.code {
            if let Some(reason) = known.wrong(code)? {
                complain(format!("`{code}`: {reason}"));
            }
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    let count = |part: fn(&Page) -> usize| pages.values().map(part).sum::<usize>();
    println!(
        "docs: {} pages, {} links, {} pieces of code name what is there",
        pages.len(),
        count(|page| page.links.len()),
        count(|page| page.code.len())
    );
    Ok(())
}

/// What a page has and names.
#[derive(Default)]
struct Page {
    headings: BTreeSet<String>,
    links: Vec<String>,
    /// Code in the text, and lines of console blocks without their prompt.
    code: Vec<String>,
}

impl Page {
    fn read(text: &str) -> Self {
        let mut page = Self::default();
        let mut heading: Option<String> = None;
        let mut console = false;
        for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
            match event {
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::End(TagEnd::Heading(_)) => {
                    page.headings.extend(heading.take().map(|text| anchor(&text)));
                }
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    page.links.push(dest_url.into_string());
                }
                Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(language))) => {
                    console = &*language == "console";
                }
                Event::End(TagEnd::CodeBlock) => console = false,
                Event::Text(text) if console => {
                    let lines = text
                        .lines()
                        .filter_map(|line| line.strip_prefix("# ").or_else(|| line.strip_prefix("$ ")));
                    page.code
                        .extend(lines.map(|line| line.split("  #").next().unwrap_or(line).trim().to_owned()));
                }
                Event::Code(code) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&code);
                    }
                    page.code.push(code.into_string());
                }
                Event::Text(text) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&text);
                    }
                }
                _ => {}
            }
        }
        page
    }
}

/// A heading's anchor, as GitHub makes it.
fn anchor(heading: &str) -> String {
    heading
        .to_lowercase()
        .chars()
        .filter_map(|c| match c {
            ' ' => Some('-'),
            c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
            _ => None,
        })
        .collect()
}

fn broken(link: &str, page: &Path, pages: &BTreeMap<PathBuf, Page>) -> Option<String> {
    if link.contains("://") {
        return None;
    }
    let (file, heading) = link.split_once('#').unwrap_or((link, ""));
    let target = if file.is_empty() {
        page.to_owned()
    } else {
        match page.parent().unwrap_or(page).join(file).canonicalize() {
            Ok(target) => target,
            Err(error) => return Some(error.to_string()),
        }
    };
    let has_heading = || {
        pages
            .get(&target)
            .is_some_and(|page| page.headings.contains(heading))
    };
    (!heading.is_empty() && !has_heading()).then(|| format!("no heading `{heading}`"))
}

/// What there is to be named.
struct Known {
    families: BTreeSet<String>,
    settings: BTreeSet<String>,
    /// Help texts by command, as they were asked for.
    help: BTreeMap<String, Option<String>>,
}

impl Known {
    fn ask() -> Result<Self> {
        let binary = setup::target_dir().join("debug/omnitap");
        let families = setup::output(Command::new(&binary).arg("families"))?;
        let config = setup::output(Command::new(&binary).arg("config"))?;
        Ok(Self {
            families: families
                .lines()
                .filter_map(|line| line.split('\t').next())
                .map(str::to_owned)
                .collect(),
            settings: config
                .lines()
                .filter(|line| !line.starts_with('#'))
                .filter_map(|line| Some(line.split_once(':')?.0.to_owned()))
                .collect(),
            help: BTreeMap::new(),
        })
    }

    /// What is wrong with a piece of code; `None`: it is right, or nothing that can be told.
    fn wrong(&mut self, code: &str) -> Result<Option<String>> {
        if ["vllm:", "vllm_omni:", "omnitap_"]
            .iter()
            .any(|prefix| code.starts_with(prefix))
        {
            return Ok(self.family(code));
        }
        let mut words = code
            .split_whitespace()
            .skip_while(|word| word.contains('=') || *word == "sudo" || *word == "flock");
        match (words.next(), words.next()) {
            (Some("cargo"), Some("xtask")) => self.command("cargo xtask", &words.collect::<Vec<_>>()),
            (Some("omnitap" | "target/release/omnitap"), Some(first)) => self.command(
                "omnitap",
                &std::iter::once(first).chain(words).collect::<Vec<_>>(),
            ),
            _ => Ok(self.setting(code).or_else(|| missing_file(code))),
        }
    }

    fn family(&self, code: &str) -> Option<String> {
        let name = code.split('{').next().unwrap_or(code);
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        // A pattern, or a piece of PromQL.
        if let Some(prefix) = name.strip_suffix('*') {
            let known = self.families.iter().any(|family| family.starts_with(prefix));
            return (!known).then(|| "no such families".to_owned());
        }
        let plain = ["_bucket", "_sum", "_count"]
            .iter()
            .find_map(|suffix| name.strip_suffix(suffix))
            .filter(|plain| self.families.contains(*plain))
            .unwrap_or(name);
        (name.chars().all(is_name) && !self.families.contains(plain)).then(|| "no such family".to_owned())
    }

    fn setting(&self, code: &str) -> Option<String> {
        let name = code.split(['=', ':', ' ']).next()?.trim_start_matches("--");
        let (first, rest) = name.split_once('.')?;
        let looks = SETTINGS.contains(&first)
            && rest
                .chars()
                .all(|c| c.is_ascii_lowercase() || c == '-' || c == '.')
            && !["yml", "yaml", "rs", "md"].iter().any(|end| rest.ends_with(end));
        (looks && !self.settings.contains(name)).then(|| "no such setting".to_owned())
    }

    /// A subcommand and its long flags.
    fn command(&mut self, program: &str, words: &[&str]) -> Result<Option<String>> {
        let Some((&subcommand, rest)) = words.split_first() else {
            return Ok(None);
        };
        if !subcommand.chars().all(|c| c.is_ascii_lowercase()) {
            return Ok(None);
        }
        let key = format!("{program} {subcommand}");
        if !self.help.contains_key(&key) {
            let binary = match program {
                "omnitap" => setup::target_dir().join("debug/omnitap"),
                _ => std::env::current_exe()?,
            };
            let output = Command::new(binary)
                .args([subcommand, "--help"])
                .output()
                .with_context(|| key.clone())?;
            let help = output
                .status
                .success()
                .then(|| String::from_utf8_lossy(&output.stdout).into_owned());
            self.help.insert(key.clone(), help);
        }
        let Some(Some(help)) = self.help.get(&key) else {
            return Ok(Some(format!("`{key}` is no command")));
        };
        let unknown = rest
            .iter()
            .take_while(|word| **word != "--" && **word != "|" && **word != ">")
            .filter_map(|word| word.strip_prefix("--")?.split('=').next())
            .find(|flag| !help.contains(&format!("--{flag}")));
        Ok(unknown.map(|flag| format!("`{key}` has no flag --{flag}")))
    }
}

/// A path of the repository that is not there.
fn missing_file(code: &str) -> Option<String> {
    let word = code
        .split_whitespace()
        .map(|word| word.trim_end_matches([',', ';', ':']))
        .find(|word| FOLDERS.iter().any(|folder| word.starts_with(folder)))?;
    // A set of files: the folder counts.
    let path = match word.find(['*', '{', '<']) {
        Some(at) => word.get(..at)?.rsplit_once('/')?.0,
        None => word,
    };
    (!setup::root().join(path).exists()).then(|| format!("there is no {path}"))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("TLS and passwords", "tls-and-passwords")]
    #[case(
        "The agent does not start: `cannot listen on`",
        "the-agent-does-not-start-cannot-listen-on"
    )]
    #[case("401, 429 or a TLS error", "401-429-or-a-tls-error")]
    fn anchors_are_those_of_github(#[case] heading: &str, #[case] wanted: &str) {
        assert_eq!(anchor(&heading.replace('`', "")), wanted);
    }

    #[test]
    fn a_page_is_read() {
        let page = Page::read(
            "# A `b`\n[l](x.md#y) `cargo xtask test`\n```console\n# omnitap run   # why\nout\n$ ls\n```\n",
        );
        assert!(page.headings.contains("a-b"));
        assert_eq!(page.links, ["x.md#y"]);
        assert_eq!(page.code, ["b", "cargo xtask test", "omnitap run", "ls"]);
    }

    #[rstest]
    #[case("omnitap_events_total{kind}", true)]
    #[case("omnitap_nothing", false)]
    #[case("omnitap_events_*", true)]
    #[case("vllm:*", false)]
    #[case("tap.ring-buffer", true)]
    #[case("tap.ring-bufer", false)]
    #[case("--tap.ring-buffer=1MiB", true)]
    #[case("xtask/src/docs.rs", true)]
    #[case("xtask/src/dogs.rs", false)]
    #[case("xtask/src/*.rs", true)]
    #[case("any other text", true)]
    fn code_is_judged(#[case] code: &str, #[case] right: bool) {
        let mut known = Known {
            families: ["omnitap_events_total".to_owned()].into(),
            settings: ["tap.ring-buffer".to_owned()].into(),
            help: BTreeMap::new(),
        };
        assert_eq!(known.wrong(code).unwrap().is_none(), right);
    }

    #[rstest]
    #[case("omnitap run --ebpf", None)]
    #[case("omnitap run --no-such", Some("`omnitap run` has no flag --no-such"))]
    #[case("omnitap walk", Some("`omnitap walk` is no command"))]
    fn commands_are_judged(#[case] code: &str, #[case] wanted: Option<&str>) {
        let mut known = Known {
            families: BTreeSet::new(),
            settings: BTreeSet::new(),
            help: [
                ("omnitap run".to_owned(), Some("  --ebpf".to_owned())),
                ("omnitap walk".to_owned(), None),
            ]
            .into(),
        };
        assert_eq!(known.wrong(code).unwrap().as_deref(), wanted);
    }
}
