//! The types of settings: from text, to text, and their limits.

use std::{
    fmt,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use crate::{
    host::diffusion::Given,
    metrics::merge::{FamilyOrder, Order},
};

/// A type of setting. The texts are one for each time that the setting was given.
pub(super) trait Value: Sized {
    /// Placeholder in the usage text.
    const NAME: &'static str;
    const MANY: bool = false;
    const BOOLEAN: bool = false;

    fn parse(texts: &[String]) -> Result<Self, String>;
    fn show(&self) -> Vec<String>;

    /// A default of the table of settings, which a test proves to be valid.
    fn of_default(texts: &[&str]) -> Self
    where
        Self: Default,
    {
        let texts: Vec<String> = texts.iter().map(|t| (*t).to_owned()).collect();
        Self::parse(&texts).unwrap_or_default()
    }
}

/// A type of setting with a single value.
trait Single: FromStr<Err: fmt::Display> + fmt::Display {
    const NAME: &'static str;
    const BOOLEAN: bool = false;
}

impl<T: Single> Value for T {
    const NAME: &'static str = <T as Single>::NAME;
    const BOOLEAN: bool = <T as Single>::BOOLEAN;

    fn parse(texts: &[String]) -> Result<Self, String> {
        match texts {
            [text] => parse_one(text),
            _ => Err(format!("takes one value, not {}", texts.len())),
        }
    }

    fn show(&self) -> Vec<String> {
        vec![self.to_string()]
    }
}

impl<T: Single> Value for Vec<T> {
    const NAME: &'static str = <T as Single>::NAME;
    const MANY: bool = true;

    fn parse(texts: &[String]) -> Result<Self, String> {
        texts.iter().map(|t| parse_one(t)).collect()
    }

    fn show(&self) -> Vec<String> {
        self.iter().map(ToString::to_string).collect()
    }
}

impl Value for Duration {
    const NAME: &'static str = "DURATION";

    fn parse(texts: &[String]) -> Result<Self, String> {
        match texts {
            [text] => {
                humantime::parse_duration(text).map_err(|e| format!("`{text}`: {e} (such as 250ms, 2s, 15m)"))
            }
            _ => Err(format!("takes one value, not {}", texts.len())),
        }
    }

    fn show(&self) -> Vec<String> {
        vec![humantime::format_duration(*self).to_string()]
    }
}

fn parse_one<T: Single>(text: &str) -> Result<T, String> {
    text.parse().map_err(|e| format!("`{text}`: {e}"))
}

/// Checks a value against limits that are written as its type is.
pub(super) fn within<T: Value + PartialOrd>(value: &T, lo: &str, hi: &str) -> Result<(), String> {
    let limits = [lo, hi].map(|text| T::parse(&[text.to_owned()]));
    if let [Ok(low), Ok(high)] = &limits
        && (low..=high).contains(&value)
    {
        return Ok(());
    }
    Err(format!("{} is not from {lo} to {hi}", value.show().concat()))
}

impl Single for bool {
    const NAME: &'static str = "BOOL";
    const BOOLEAN: bool = true;
}

impl Single for u32 {
    const NAME: &'static str = "NUMBER";
}

impl Single for SocketAddr {
    const NAME: &'static str = "IP:PORT";
}

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub u32);

const UNITS: [(&str, u32); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl FromStr for Size {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (number, unit) = UNITS
            .iter()
            .find_map(|(name, bytes)| text.strip_suffix(name).map(|n| (n, *bytes)))
            .unwrap_or((text.strip_suffix('B').unwrap_or(text), 1));
        let number: u32 = number
            .trim_end()
            .parse()
            .map_err(|_| "not a size (such as 65536, 64KiB or 8MiB)")?;
        number.checked_mul(unit).map(Self).ok_or("larger than 4 GiB")
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The largest unit that leaves no rest, so that the text gives the same size again.
        match UNITS
            .iter()
            .find(|(_, bytes)| self.0 != 0 && self.0.is_multiple_of(*bytes))
        {
            Some((name, bytes)) => write!(f, "{}{name}", self.0 / bytes),
            None => write!(f, "{}", self.0),
        }
    }
}

impl Single for Size {
    const NAME: &'static str = "SIZE";
}

/// A file, or none.
impl Value for Option<PathBuf> {
    const NAME: &'static str = "FILE";

    fn parse(texts: &[String]) -> Result<Self, String> {
        match texts {
            [] => Ok(None),
            [text] => Ok(Some(PathBuf::from(text)).filter(|path| !path.as_os_str().is_empty())),
            _ => Err(format!("takes one value, not {}", texts.len())),
        }
    }

    fn show(&self) -> Vec<String> {
        vec![
            self.as_deref()
                .map_or_else(String::new, |path| path.display().to_string()),
        ]
    }
}

/// Where HTTP is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// By TCP.
    Tcp {
        /// IP address or host name; `None`: all addresses, IPv6 and IPv4.
        host: Option<String>,
        /// TCP port; 0: any free one.
        port: u16,
    },
    /// By a Unix socket with this path.
    Unix(PathBuf),
}

impl FromStr for ListenAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            // `sun_path` has 108 bytes, and ends with a zero.
            return match path.as_os_str().len() {
                1..108 if path.is_absolute() => Ok(Self::Unix(path)),
                _ => Err("not an absolute path of less than 108 bytes after `unix:`"),
            };
        }
        let (host, port) = text.rsplit_once(':').ok_or(
            "not an address (such as 127.0.0.1:9477, :9477, [::1]:9477 or unix:/run/omnitap/http.sock)",
        )?;
        let port = port
            .parse()
            .map_err(|_| "the port is not a number from 0 to 65535")?;
        let host = match host.strip_prefix('[') {
            Some(rest) => {
                let address = rest.strip_suffix(']').ok_or("a `]` is missing")?;
                address
                    .parse::<Ipv6Addr>()
                    .map_err(|_| "no IPv6 address in the brackets")?;
                Some(address.to_owned())
            }
            None if host.contains(':') => return Err("an IPv6 address needs brackets: [::1]:9477"),
            None if host.contains(|c: char| c.is_whitespace() || c == '/') => return Err("not a host name"),
            None => Some(host.to_owned()).filter(|h| !h.is_empty()),
        };
        Ok(Self::Tcp { host, port })
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp { host, port } => {
                let host = host.as_deref().unwrap_or("");
                match host.parse() {
                    Ok(IpAddr::V6(address)) => write!(f, "[{address}]:{port}"),
                    _ => write!(f, "{host}:{port}"),
                }
            }
        }
    }
}

impl Single for ListenAddress {
    const NAME: &'static str = "ADDRESS";
}

/// A file or a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePath(pub PathBuf);

impl FromStr for FilePath {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let path = PathBuf::from(text);
        if path.is_absolute() {
            Ok(Self(path))
        } else {
            Err("not an absolute path")
        }
    }
}

impl fmt::Display for FilePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.display())
    }
}

impl Single for FilePath {
    const NAME: &'static str = "PATH";
}

/// A name for a model that can't be told otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelName {
    /// Part of a process title or command line.
    pub pattern: String,
    /// The value of `model_name`.
    pub name: String,
}

impl ModelName {
    /// The name that the first of these command lines gives in which a pattern is found.
    pub(crate) fn of(names: &[Self], lines: impl IntoIterator<Item = String>) -> Option<&str> {
        let mut known = lines
            .into_iter()
            .filter_map(|line| names.iter().find(|known| line.contains(&known.pattern)));
        known.next().map(|known| known.name.as_str())
    }
}

impl FromStr for ModelName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // The pattern may be a flag with its value: the last sign divides.
        match text.rsplit_once('=') {
            Some((pattern, name)) if !pattern.is_empty() && !name.is_empty() => Ok(Self {
                pattern: pattern.to_owned(),
                name: name.to_owned(),
            }),
            _ => Err("not of the form PATTERN=NAME"),
        }
    }
}

impl fmt::Display for ModelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.pattern, self.name)
    }
}

impl Single for ModelName {
    const NAME: &'static str = "PATTERN=NAME";
}

/// Where a socket is; `None`: there is none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SocketPath(pub Option<PathBuf>);

impl FromStr for SocketPath {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            // What YAML may make of `off`.
            "off" | "false" => Ok(Self(None)),
            path if path.starts_with('/') => Ok(Self(Some(path.into()))),
            _ => Err("neither an absolute path nor `off`"),
        }
    }
}

impl fmt::Display for SocketPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(path) => write!(f, "{}", path.display()),
            None => f.write_str("off"),
        }
    }
}

impl Single for SocketPath {
    const NAME: &'static str = "PATH";
}

/// Permissions of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mode(pub u32);

impl FromStr for Mode {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        u32::from_str_radix(text, 8)
            .ok()
            .filter(|mode| *mode <= 0o777)
            .map(Self)
            .ok_or("not permissions in octal (such as 0660)")
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl Single for Mode {
    const NAME: &'static str = "MODE";
}

/// A group, by name or number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupName(pub String);

impl FromStr for GroupName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() || text.contains([':', ' ']) {
            return Err("not the name of a group");
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for GroupName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Single for GroupName {
    const NAME: &'static str = "GROUP";
}

impl Single for Order {
    const NAME: &'static str = "ORDER";
}

impl Single for FamilyOrder {
    const NAME: &'static str = "FAMILY=ORDER";
}

/// Where the diffusion stages of a pipeline stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiffusionStages(pub Given);

impl FromStr for DiffusionStages {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let place = |text: &str| {
            let (stage, replica) = text.split_once('/')?;
            Some((stage.parse().ok()?, replica.parse().ok()?))
        };
        text.rsplit_once('=')
            .filter(|(pattern, _)| !pattern.is_empty())
            .and_then(|(pattern, places)| {
                Some(Self(Given {
                    pattern: pattern.to_owned(),
                    places: places.split(':').map(place).collect::<Option<_>>()?,
                }))
            })
            .ok_or("not of the form PATTERN=STAGE/REPLICA[:STAGE/REPLICA...]")
    }
}

impl fmt::Display for DiffusionStages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Given { pattern, places } = &self.0;
        let places: Vec<String> = places
            .iter()
            .map(|(stage, replica)| format!("{stage}/{replica}"))
            .collect();
        write!(f, "{pattern}={}", places.join(":"))
    }
}

impl Single for DiffusionStages {
    const NAME: &'static str = "PATTERN=STAGE/REPLICA";
}

/// The least severe level that is logged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogLevel {
    /// What needs an operator.
    Error,
    /// What is lost or degraded.
    Warn,
    /// Pipelines and probes that come and go.
    #[default]
    Info,
    /// Decisions.
    Debug,
    /// Everything.
    Trace,
}

/// The form of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Use of the engine's own `/metrics`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineMetrics {
    /// None.
    Off,
    /// For what no other source gives.
    #[default]
    Fill,
}

/// Whether records of requests go to the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RequestLog {
    /// No.
    #[default]
    Off,
    /// A summary and tables, for people.
    Text,
    /// One JSON object each.
    Json,
}

macro_rules! words {
    ($type:ident, $name:literal, $expected:literal, $($word:literal => $variant:ident),*) => {
        impl FromStr for $type {
            type Err = &'static str;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $($word => Ok(Self::$variant),)*
                    _ => Err($expected),
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$variant => $word,)*
                })
            }
        }

        impl Single for $type {
            const NAME: &'static str = $name;
        }
    };
}

words!(LogLevel, "LEVEL", "not one of error, warn, info, debug, trace",
    "error" => Error, "warn" => Warn, "info" => Info, "debug" => Debug, "trace" => Trace);
words!(LogFormat, "FORMAT", "not one of text, json", "text" => Text, "json" => Json);
words!(RequestLog, "FORM", "not one of off, text, json", "off" => Off, "text" => Text, "json" => Json);
words!(EngineMetrics, "USE", "not one of off, fill", "off" => Off, "fill" => Fill);

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// Neither an API server nor a headless launcher: the title of the root process tells, else its parent's.
    #[rstest]
    #[case::root(&["replay.py: stage 0", "bash run-b.sh"], Some("org/a"))]
    #[case::parent(&["python worker.py", "bash run-b.sh"], Some("org/b"))]
    #[case::first_pattern(&["replay.py --from run-b.sh"], Some("org/a"))]
    #[case::none(&["python worker.py", "bash"], None)]
    #[case::no_process(&[], None)]
    fn model_by_title_or_parent(#[case] lines: &[&str], #[case] want: Option<&str>) {
        let names: Vec<ModelName> = ["replay.py=org/a", "run-b.sh=org/b"]
            .iter()
            .filter_map(|text| text.parse().ok())
            .collect();
        assert_eq!(
            ModelName::of(&names, lines.iter().copied().map(str::to_owned)),
            want
        );
    }
}
