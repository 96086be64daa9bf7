//! The socket's file: where it is made, whose it is, and when an old one is replaced.

use std::{
    fs, io,
    os::unix::{
        fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _},
        net::UnixStream,
    },
    path::{Path, PathBuf},
};

use tokio::net::UnixListener;

use super::Settings;

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// The folder or the file can't be made.
    #[error("cannot make the stat socket {path}: {source}")]
    Make {
        /// Its path.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// Something else is there.
    #[error("{path} is there and is no socket")]
    NoSocket {
        /// Its path.
        path: PathBuf,
    },
    /// Somebody serves it.
    #[error("another process serves {path} (a second omnitap?)")]
    Served {
        /// Its path.
        path: PathBuf,
    },
    /// A group that this machine does not have.
    #[error("no group `{name}` in {}", GROUPS)]
    Group {
        /// Its name.
        name: String,
    },
}

/// Where groups have their names.
const GROUPS: &str = "/etc/group";

/// A socket that listens, and its file.
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) listener: UnixListener,
    pub(super) path: PathBuf,
    /// Device and inode.
    pub(super) file: (u64, u64),
}

impl Bound {
    pub(super) fn new(settings: &Settings) -> Result<Self, SocketError> {
        let path = &settings.path;
        let make = |source| SocketError::Make {
            path: path.clone(),
            source,
        };
        let group = group_ids(settings.groups.get(..1).unwrap_or_default())?;
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(make)?;
        }
        not_served(path)?;
        // Made beside its place and moved there: nobody finds it with other permissions, and an old file is replaced.
        let beside = beside(path);
        drop(fs::remove_file(&beside));
        let listener = UnixListener::bind(&beside).map_err(make)?;
        let ready = || {
            if let Some(gid) = group.first() {
                std::os::unix::fs::chown(&beside, None, Some(*gid))?;
            }
            fs::set_permissions(&beside, fs::Permissions::from_mode(settings.mode))?;
            fs::rename(&beside, path)?;
            let file = fs::symlink_metadata(path)?;
            Ok((file.dev(), file.ino()))
        };
        let file = ready().map_err(|source| {
            drop(fs::remove_file(&beside));
            make(source)
        })?;
        Ok(Self {
            listener,
            path: path.clone(),
            file,
        })
    }
}

fn beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}", std::process::id()));
    name.into()
}

/// Fails where the path is taken: by a socket that is served, or by another kind of file.
fn not_served(path: &Path) -> Result<(), SocketError> {
    let path = path.to_owned();
    match fs::symlink_metadata(&path) {
        Ok(file) if !file.file_type().is_socket() => Err(SocketError::NoSocket { path }),
        Ok(_) => match UnixStream::connect(&path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => Ok(()),
            Ok(_) | Err(_) => Err(SocketError::Served { path }),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(SocketError::Make { path, source }),
    }
}

/// Whether the socket can be made, without leaving one: what was found, in words.
pub fn probe(settings: &Settings) -> Result<String, SocketError> {
    let path = &settings.path;
    group_ids(&settings.groups)?;
    match not_served(path) {
        Err(SocketError::Served { .. }) => return Ok(format!("{} is served", path.display())),
        other => other?,
    }
    let make = |source| SocketError::Make {
        path: path.clone(),
        source,
    };
    let folder = path.parent().unwrap_or(Path::new("/"));
    if !folder.exists() {
        fs::create_dir_all(folder).map_err(make)?;
    }
    let beside = beside(path);
    drop(std::os::unix::net::UnixListener::bind(&beside).map_err(make)?);
    fs::remove_file(&beside).map_err(make)?;
    Ok(format!("{} can be made", path.display()))
}

/// The numbers of groups that are given by name or number.
pub(super) fn group_ids(groups: &[String]) -> Result<Vec<u32>, SocketError> {
    let known = || fs::read_to_string(GROUPS).unwrap_or_default();
    groups
        .iter()
        .map(|name| {
            let by_name = || {
                known().lines().find_map(|line| {
                    let mut fields = line.split(':');
                    (fields.next() == Some(name.as_str())).then(|| fields.nth(1)?.parse().ok())?
                })
            };
            name.parse()
                .ok()
                .or_else(by_name)
                .ok_or_else(|| SocketError::Group { name: name.clone() })
        })
        .collect()
}
