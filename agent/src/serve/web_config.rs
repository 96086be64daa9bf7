//! The web configuration file: TLS, users, response headers and a limit on requests, in the format that Prometheus and
//! its exporters share (exporter-toolkit).
//!
//! What the format has and this server does not give is an error, never a setting without effect, except `http2`: the
//! server speaks HTTP/1.1, which every client takes.

use std::{
    collections::{BTreeMap, HashMap},
    fmt, fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use hyper::header::{HeaderName, HeaderValue};
use rustls::{
    CipherSuite, NamedGroup, RootCertStore, ServerConfig, SupportedProtocolVersion,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
    version::{TLS12, TLS13},
};
use serde::Deserialize;

/// Largest file in bytes, certificates included: a device or a wrong file must not fill memory.
const MAX_FILE: u64 = 1 << 20;
/// The highest cost of a password's hash: each step doubles the time, and 14 takes about a second.
const MAX_COST: u32 = 14;

/// Why the file can't be taken.
#[derive(Debug, thiserror::Error)]
pub enum WebConfigError {
    /// It, or a file that it names, can't be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// It is not of the format.
    #[error("{path}: {reason}")]
    Format {
        /// The file.
        path: PathBuf,
        /// The parser's words, with line and column.
        reason: String,
    },
    /// A value that the server does not take.
    #[error("{path}: {key}: {reason}")]
    Value {
        /// The file.
        path: PathBuf,
        /// The key.
        key: &'static str,
        /// What is wrong.
        reason: String,
    },
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    tls_server_config: Option<Tls>,
    http_server_config: Option<Http>,
    basic_auth_users: Option<BTreeMap<String, String>>,
    rate_limit: Option<RateLimit>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Tls {
    cert: String,
    key: String,
    client_ca: String,
    cert_file: String,
    key_file: String,
    client_auth_type: String,
    client_ca_file: String,
    client_allowed_sans: Vec<String>,
    min_version: String,
    max_version: String,
    cipher_suites: Vec<String>,
    prefer_server_cipher_suites: Option<bool>,
    curve_preferences: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Http {
    #[serde(rename = "http2")]
    _http2: Option<bool>,
    headers: HashMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RateLimit {
    interval: String,
    #[serde(default)]
    burst: u32,
}

/// At most `burst` requests at once, and one an interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rate {
    pub(super) interval: Duration,
    pub(super) burst: u32,
}

/// What the file says.
#[derive(Default)]
pub(super) struct WebConfig {
    /// `None`: plain HTTP.
    pub(super) tls: Option<Arc<ServerConfig>>,
    /// Users and their passwords' bcrypt hashes; none: everybody may read.
    pub(super) users: BTreeMap<String, String>,
    /// Set in every answer.
    pub(super) headers: Vec<(HeaderName, HeaderValue)>,
    pub(super) rate: Option<Rate>,
    /// It and the files that it names: when one changes, all are read anew.
    pub(super) files: Vec<PathBuf>,
}

impl fmt::Debug for WebConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // No keys, no hashes.
        f.debug_struct("WebConfig")
            .field("files", &self.files)
            .finish_non_exhaustive()
    }
}

impl WebConfig {
    /// Reads the file and what it names.
    pub(super) fn read(path: &Path) -> Result<Self, WebConfigError> {
        let text = read(path)?;
        let parsed: Option<File> =
            serde_saphyr::from_str(&String::from_utf8_lossy(&text)).map_err(|error| {
                WebConfigError::Format {
                    path: path.to_owned(),
                    reason: error.to_string(),
                }
            })?;
        let File {
            tls_server_config,
            http_server_config,
            basic_auth_users,
            rate_limit,
        } = parsed.unwrap_or_default();
        let mut reading = Reading {
            path,
            files: vec![path.to_owned()],
        };
        let tls = tls_server_config.map(|tls| reading.tls(&tls)).transpose()?;
        let http = http_server_config.unwrap_or_default();
        Ok(Self {
            tls: tls.flatten(),
            users: reading.users(basic_auth_users.unwrap_or_default())?,
            headers: reading.headers(http.headers)?,
            rate: rate_limit
                .map(|limit| reading.rate(&limit))
                .transpose()?
                .flatten(),
            files: reading.files,
        })
    }
}

fn read(path: &Path) -> Result<Vec<u8>, WebConfigError> {
    let read = || {
        let mut bytes = Vec::new();
        let length = fs::File::open(path)?.take(MAX_FILE + 1).read_to_end(&mut bytes)?;
        if length as u64 > MAX_FILE {
            return Err(io::Error::other(format!("longer than {MAX_FILE} bytes")));
        }
        Ok(bytes)
    };
    read().map_err(|source| WebConfigError::Read {
        path: path.to_owned(),
        source,
    })
}

/// The file being read, for errors and relative paths.
struct Reading<'a> {
    path: &'a Path,
    files: Vec<PathBuf>,
}

impl Reading<'_> {
    fn wrong(&self, key: &'static str, reason: impl Into<String>) -> WebConfigError {
        WebConfigError::Value {
            path: self.path.to_owned(),
            key,
            reason: reason.into(),
        }
    }

    /// PEM text: as it is, or from a file whose path is relative to this one; empty where neither is given.
    fn pem(&mut self, text: &str, file: &str, key: &'static str) -> Result<Vec<u8>, WebConfigError> {
        match (text, file) {
            (text, "") => Ok(text.as_bytes().to_vec()),
            ("", file) => {
                let path = self.path.parent().unwrap_or(Path::new("")).join(file);
                let bytes = read(&path)?;
                self.files.push(path);
                Ok(bytes)
            }
            _ => Err(self.wrong(key, "given as text and as a file")),
        }
    }

    fn tls(&mut self, tls: &Tls) -> Result<Option<Arc<ServerConfig>>, WebConfigError> {
        let chain = self.pem(&tls.cert, &tls.cert_file, "cert_file")?;
        let key = self.pem(&tls.key, &tls.key_file, "key_file")?;
        let authorities = self.pem(&tls.client_ca, &tls.client_ca_file, "client_ca_file")?;
        if chain.is_empty() && key.is_empty() && authorities.is_empty() && tls.client_auth_type.is_empty() {
            return Ok(None);
        }
        let chain: Vec<_> = CertificateDer::pem_slice_iter(&chain)
            .collect::<Result<_, _>>()
            .map_err(|error| self.wrong("cert_file", error.to_string()))?;
        if chain.is_empty() {
            return Err(self.wrong("cert_file", "no certificate"));
        }
        let key = PrivateKeyDer::from_pem_slice(&key)
            .map_err(|error| self.wrong("key_file", format!("no private key: {error}")))?;
        if !tls.client_allowed_sans.is_empty() {
            return Err(self.wrong(
                "client_allowed_sans",
                "not supported: let client_ca sign these clients alone",
            ));
        }

        let provider = Arc::new(self.provider(tls)?);
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&self.versions(tls)?)
            .map_err(|error| self.wrong("tls_server_config", error.to_string()))?;
        let builder = match self.client_authentication(tls, &authorities)? {
            None => builder.with_no_client_auth(),
            Some(optional) => {
                let mut roots = RootCertStore::empty();
                for authority in CertificateDer::pem_slice_iter(&authorities) {
                    authority
                        .map_err(|error| error.to_string())
                        .and_then(|authority| roots.add(authority).map_err(|error| error.to_string()))
                        .map_err(|reason| self.wrong("client_ca_file", reason))?;
                }
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                let verifier = if optional {
                    verifier.allow_unauthenticated()
                } else {
                    verifier
                };
                builder.with_client_cert_verifier(
                    verifier
                        .build()
                        .map_err(|error| self.wrong("client_ca_file", error.to_string()))?,
                )
            }
        };
        let mut config = builder
            .with_single_cert(chain, key)
            .map_err(|error| self.wrong("cert_file", error.to_string()))?;
        config.ignore_client_order = tls.prefer_server_cipher_suites.unwrap_or(true);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Some(Arc::new(config)))
    }

    /// `None`: no certificate is asked for; `Some(true)`: one that is given is verified.
    fn client_authentication(&self, tls: &Tls, authorities: &[u8]) -> Result<Option<bool>, WebConfigError> {
        let optional = match tls.client_auth_type.as_str() {
            "" | "NoClientCert" if authorities.is_empty() => return Ok(None),
            "" | "NoClientCert" => {
                return Err(self.wrong(
                    "client_auth_type",
                    "there is a client CA: RequireAndVerifyClientCert is needed",
                ));
            }
            "RequireAndVerifyClientCert" => false,
            "VerifyClientCertIfGiven" => true,
            "RequestClientCert" | "RequireAnyClientCert" | "RequireClientCert" => {
                return Err(self.wrong(
                    "client_auth_type",
                    format!(
                        "{} verifies nothing and is not supported: use RequireAndVerifyClientCert",
                        tls.client_auth_type
                    ),
                ));
            }
            other => return Err(self.wrong("client_auth_type", format!("`{other}` is unknown"))),
        };
        if authorities.is_empty() {
            return Err(self.wrong("client_ca_file", "needed to verify clients"));
        }
        Ok(Some(optional))
    }

    /// rustls has no version before 1.2: a lower minimum is 1.2.
    fn versions(&self, tls: &Tls) -> Result<Vec<&'static SupportedProtocolVersion>, WebConfigError> {
        let needs_13 = match tls.min_version.as_str() {
            "" | "TLS10" | "TLS11" | "TLS12" => false,
            "TLS13" => true,
            other => return Err(self.wrong("min_version", format!("`{other}` is not one of TLS12, TLS13"))),
        };
        match (tls.max_version.as_str(), needs_13) {
            ("" | "TLS13", false) => Ok(vec![&TLS13, &TLS12]),
            ("" | "TLS13", true) => Ok(vec![&TLS13]),
            ("TLS12", false) => Ok(vec![&TLS12]),
            ("TLS12", true) => Err(self.wrong("max_version", "lower than min_version")),
            (other, _) => Err(self.wrong("max_version", format!("`{other}` is not one of TLS12, TLS13"))),
        }
    }

    fn provider(&self, tls: &Tls) -> Result<CryptoProvider, WebConfigError> {
        let mut provider = rustls::crypto::ring::default_provider();
        if !tls.cipher_suites.is_empty() {
            // The list is of suites up to TLS 1.2; those of 1.3 are not to be chosen.
            let all = std::mem::take(&mut provider.cipher_suites);
            provider
                .cipher_suites
                .extend(all.iter().filter(|s| s.tls13().is_some()));
            for name in &tls.cipher_suites {
                let known = all.iter().find(|suite| go_name(suite.suite()) == *name);
                match known {
                    Some(suite) if suite.tls13().is_some() => {}
                    Some(suite) => provider.cipher_suites.push(*suite),
                    None => return Err(self.wrong("cipher_suites", format!("`{name}` is not supported"))),
                }
            }
        }
        if !tls.curve_preferences.is_empty() {
            let all = std::mem::take(&mut provider.kx_groups);
            for name in &tls.curve_preferences {
                let group = match name.as_str() {
                    "CurveP256" => NamedGroup::secp256r1,
                    "CurveP384" => NamedGroup::secp384r1,
                    "X25519" => NamedGroup::X25519,
                    other => {
                        return Err(self.wrong("curve_preferences", format!("`{other}` is not supported")));
                    }
                };
                provider
                    .kx_groups
                    .extend(all.iter().filter(|known| known.name() == group));
            }
        }
        Ok(provider)
    }

    fn users(&self, users: BTreeMap<String, String>) -> Result<BTreeMap<String, String>, WebConfigError> {
        for (user, hash) in &users {
            let cost = hash
                .parse::<bcrypt::HashParts>()
                .map_err(|_| {
                    self.wrong(
                        "basic_auth_users",
                        format!(
                            "the password of `{user}` is no bcrypt hash (`htpasswd -nBC 10 \"\"` makes one)"
                        ),
                    )
                })?
                .get_cost();
            if cost > MAX_COST {
                return Err(self.wrong(
                    "basic_auth_users",
                    format!("the hash of `{user}` has cost {cost}: at most {MAX_COST}"),
                ));
            }
        }
        Ok(users)
    }

    fn headers(
        &self,
        headers: HashMap<String, String>,
    ) -> Result<Vec<(HeaderName, HeaderValue)>, WebConfigError> {
        headers
            .into_iter()
            .filter(|(_, value)| !value.is_empty())
            .map(|(name, value)| {
                let allowed: &[&str] = match name.as_str() {
                    "Strict-Transport-Security" | "X-XSS-Protection" | "Content-Security-Policy" => &[],
                    "X-Content-Type-Options" => &["nosniff"],
                    "X-Frame-Options" => &["deny", "sameorigin"],
                    _ => return Err(self.wrong("headers", format!("`{name}` can't be set"))),
                };
                let value_of = HeaderValue::try_from(&value).ok();
                match (HeaderName::try_from(&name).ok(), value_of) {
                    (Some(name), Some(header)) if allowed.is_empty() || allowed.contains(&value.as_str()) => {
                        Ok((name, header))
                    }
                    _ => Err(self.wrong("headers", format!("`{name}` can't be `{value}`"))),
                }
            })
            .collect()
    }

    fn rate(&self, limit: &RateLimit) -> Result<Option<Rate>, WebConfigError> {
        let interval = match limit.interval.as_str() {
            "0" => Duration::ZERO,
            text => humantime::parse_duration(text)
                .map_err(|error| self.wrong("rate_limit", format!("interval `{text}`: {error}")))?,
        };
        if interval.is_zero() {
            return Ok(None);
        }
        if limit.burst == 0 {
            return Err(self.wrong("rate_limit", "a burst of 0 lets nothing pass"));
        }
        Ok(Some(Rate {
            interval,
            burst: limit.burst,
        }))
    }
}

/// The name that Go, and so the format, has for a suite: rustls' own, but for the 13 in names of TLS 1.3.
fn go_name(suite: CipherSuite) -> String {
    format!("{suite:?}").replace("TLS13_", "TLS_")
}
