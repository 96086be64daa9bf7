//! Who may read: the web configuration as it stands, renewed when its files change.

use std::{
    collections::HashMap,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use hyper::header::{AUTHORIZATION, HeaderMap};
use parking_lot::{Mutex, RwLock};
use sha2::{Digest as _, Sha256};
use tokio::sync::Semaphore;
use tracing::{error, info};

use super::web_config::{Rate, WebConfig, WebConfigError};

/// Pause between two looks at the files.
const LOOK: Duration = Duration::from_secs(2);
/// How long a request waits for its turn to have its password verified.
const TURN: Duration = Duration::from_secs(3);
/// How long nobody's password is verified after a wrong one: guessing must cost the agent no core.
const PENALTY: Duration = Duration::from_millis(500);

/// What is to become of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is answered.
    Pass,
    /// It needs a user and a password.
    Unauthorized,
    /// It comes too soon.
    TooMany,
}

/// The rules for reading.
#[derive(Debug)]
pub(super) struct Access {
    path: Option<PathBuf>,
    now: RwLock<Arc<WebConfig>>,
    passwords: Arc<Passwords>,
    bucket: Mutex<Bucket>,
}

impl Access {
    /// Reads the file, if there is one.
    pub(super) fn new(path: Option<PathBuf>) -> Result<Self, WebConfigError> {
        let now = path.as_deref().map(WebConfig::read).transpose()?;
        Ok(Self {
            path,
            now: RwLock::new(Arc::new(now.unwrap_or_default())),
            passwords: Arc::default(),
            bucket: Mutex::default(),
        })
    }

    /// The rules as they stand.
    pub(super) fn now(&self) -> Arc<WebConfig> {
        Arc::clone(&self.now.read())
    }

    /// Renews the rules when a file changes, for ever. A file that can't be taken changes nothing.
    pub(super) async fn keep_up(&self) {
        let Some(path) = &self.path else {
            return std::future::pending().await;
        };
        let mut known = stamps(&self.now().files);
        loop {
            tokio::time::sleep(LOOK).await;
            let found = stamps(&self.now().files);
            if found == known {
                continue;
            }
            known = found;
            match WebConfig::read(path) {
                Ok(read) => {
                    // Other files may be named now.
                    known = stamps(&read.files);
                    *self.now.write() = Arc::new(read);
                    info!(path = %path.display(), "web configuration renewed");
                }
                Err(error) => error!(%error, "web configuration not renewed, the last one stays"),
            }
        }
    }

    /// Judges a request by its headers.
    pub(super) async fn judge(&self, headers: &HeaderMap) -> Verdict {
        let rules = self.now();
        if let Some(rate) = rules.rate
            && !self.bucket.lock().take(rate, Instant::now())
        {
            return Verdict::TooMany;
        }
        if rules.users.is_empty() {
            return Verdict::Pass;
        }
        match credentials(headers) {
            Some((user, password)) => self.passwords.verify(&rules, user, password).await,
            None => Verdict::Unauthorized,
        }
    }
}

/// What tells that a file is another: device, inode, time of change in seconds and nanoseconds, size. A mounted Secret
/// changes by a link.
type Stamp = (u64, u64, i64, i64, u64);

/// `None` for a file that is not there.
fn stamps(files: &[PathBuf]) -> Vec<Option<Stamp>> {
    let stamp = |path: &Path| {
        let file = fs::metadata(path).ok()?;
        Some((
            file.dev(),
            file.ino(),
            file.mtime(),
            file.mtime_nsec(),
            file.size(),
        ))
    };
    files.iter().map(|path| stamp(path)).collect()
}

/// User and password of HTTP basic authentication (RFC 7617).
fn credentials(headers: &HeaderMap) -> Option<(String, String)> {
    let (scheme, encoded) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let text = String::from_utf8(BASE64_STANDARD.decode(encoded.trim()).ok()?).ok()?;
    let (user, password) = text.split_once(':')?;
    Some((user.to_owned(), password.to_owned()))
}

/// Verifies passwords: slow by design the first time, fast for one that was right before.
#[derive(Debug)]
struct Passwords {
    /// One at a time: each takes some 50 ms of a core.
    turn: Semaphore,
    /// By user, a salted digest of what was right.
    right: Mutex<HashMap<String, [u8; 32]>>,
    salt: [u8; 32],
}

impl Default for Passwords {
    fn default() -> Self {
        let mut salt = [0; 32];
        let random = rustls::crypto::ring::default_provider().secure_random;
        // Without randomness the digests are as good as their passwords, in the memory of a process of root's.
        let _ = random.fill(&mut salt);
        Self {
            turn: Semaphore::new(1),
            right: Mutex::default(),
            salt,
        }
    }
}

impl Passwords {
    async fn verify(self: &Arc<Self>, rules: &WebConfig, user: String, password: String) -> Verdict {
        let hash = rules.users.get(&user).cloned();
        let digest = self.digest(&user, hash.as_deref().unwrap_or_default(), &password);
        if hash.is_some() && self.right.lock().get(&user) == Some(&digest) {
            return Verdict::Pass;
        }
        let Ok(Ok(_turn)) = tokio::time::timeout(TURN, self.turn.acquire()).await else {
            return Verdict::TooMany;
        };
        // For a user that there is not, another's hash: the time must not tell.
        let known = hash.is_some();
        let Some(hash) = hash.or_else(|| rules.users.values().next().cloned()) else {
            return Verdict::Unauthorized;
        };
        let verified = tokio::task::spawn_blocking(move || bcrypt::verify(password, &hash));
        if known && matches!(verified.await, Ok(Ok(true))) {
            self.right.lock().insert(user, digest);
            return Verdict::Pass;
        }
        tokio::time::sleep(PENALTY).await;
        Verdict::Unauthorized
    }

    /// The hash is part of it, so that a changed one is verified anew.
    fn digest(&self, user: &str, hash: &str, password: &str) -> [u8; 32] {
        let mut digest = Sha256::new();
        digest.update(self.salt);
        for part in [user, hash, password] {
            digest.update((part.len() as u64).to_le_bytes());
            digest.update(part);
        }
        digest.finalize().into()
    }
}

/// A token bucket.
#[derive(Debug, Default)]
struct Bucket {
    /// Requests that may pass at once, and when that was so; `None`: it is full.
    left: Option<(f64, Instant)>,
}

impl Bucket {
    fn take(&mut self, rate: Rate, now: Instant) -> bool {
        let burst = f64::from(rate.burst);
        let left = match self.left {
            None => burst,
            Some((left, then)) => {
                let new = now.saturating_duration_since(then).as_secs_f64() / rate.interval.as_secs_f64();
                (left + new).min(burst)
            }
        };
        let pass = left >= 1.0;
        self.left = Some((if pass { left - 1.0 } else { left }, now));
        pass
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::as_is("Basic dTpw", Some(("u", "p")))]
    #[case::scheme_in_any_case("bAsIc dTpw", Some(("u", "p")))]
    #[case::colon_in_the_password("Basic dTpwOng=", Some(("u", "p:x")))]
    #[case::empty_password("Basic dTo=", Some(("u", "")))]
    #[case::no_colon("Basic dQ==", None)]
    #[case::another_scheme("Bearer dTpw", None)]
    #[case::no_base64("Basic %%%", None)]
    #[case::no_text("Basic /w==", None)]
    #[case::nothing("", None)]
    fn credentials_of_a_header(#[case] header: &str, #[case] wanted: Option<(&str, &str)>) {
        let mut headers = HeaderMap::new();
        headers.insert(AUTHORIZATION, header.parse().unwrap());
        let found = credentials(&headers);
        assert_eq!(found.as_ref().map(|(u, p)| (u.as_str(), p.as_str())), wanted);
    }

    #[test]
    fn a_bucket_lets_a_burst_pass_and_then_one_an_interval() {
        let rate = Rate {
            interval: Duration::from_secs(1),
            burst: 3,
        };
        let start = Instant::now();
        let mut bucket = Bucket::default();
        let at = |bucket: &mut Bucket, ms: u64| bucket.take(rate, start + Duration::from_millis(ms));
        assert_eq!(
            [0, 1, 2, 3].map(|ms| at(&mut bucket, ms)),
            [true, true, true, false]
        );
        assert_eq!(
            [900, 1100, 1200, 2200].map(|ms| at(&mut bucket, ms)),
            [false, true, false, true]
        );
        // A long rest gives no more than a burst.
        let later = [90_000, 90_001, 90_002, 90_003].map(|ms| at(&mut bucket, ms));
        assert_eq!(later, [true, true, true, false]);
    }
}
