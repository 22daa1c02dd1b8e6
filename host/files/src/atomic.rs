//! Replaces a small file that other processes may read at any time.
//!
//! Every concurrent reader finds the complete old file or the complete new one. The new file is not
//! durable until the caller has synced it and called [`sync_name`].

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Replaces `path` by a file with this content, with `mode` as far as the umask allows.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    replace_with(path, bytes, mode, |_| Ok(()))
}

/// Like [`replace`], and calls `finish` on the new file before it becomes visible.
pub fn replace_with(
    path: &Path,
    bytes: &[u8],
    mode: u32,
    finish: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    // Removes a file that an earlier attempt left, and must not follow a link planted by another
    // user.
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&new)?;
    file.write_all(bytes)?;
    finish(&file)?;
    fs::rename(&new, path)
}

/// Makes the name of a file durable, by syncing its directory.
pub fn sync_name(path: &Path) -> io::Result<()> {
    directory_of(path)?.sync_all()
}

/// The path to [`replace`]: that of the file itself, if `path` is a symbolic link to it. Fails if
/// something else has this path, because a replacement would remove it: a device such as
/// `/dev/null`, for example.
pub fn target(path: &Path) -> io::Result<PathBuf> {
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let why = match fs::symlink_metadata(&path) {
        Ok(found) if found.is_symlink() => {
            "it is a symbolic link to a file that does not exist: name that file"
        }
        Ok(found) if found.is_dir() => "it is a directory: name a file in it",
        Ok(found) if !found.is_file() => "it is a device, a pipe or a socket: name a file",
        // If the path cannot be examined, the write reports why.
        _ => return Ok(path),
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, why))
}

/// Waits until no other process that calls this function changes the file, until the returned lock
/// is dropped. Returns also the [`target`] of the path, or its error.
///
/// It locks the directory, because [`replace`] replaces the file.
pub fn lock(path: &Path) -> io::Result<(PathBuf, File)> {
    let path = target(path)?;
    let directory = directory_of(&path)?;
    directory.lock()?;
    Ok((path, directory))
}

fn directory_of(path: &Path) -> io::Result<File> {
    let parent = path.parent().filter(|it| !it.as_os_str().is_empty());
    File::open(parent.unwrap_or(Path::new(".")))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_files_and_links_to_them_are_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let place = |name: &str| directory.path().join(name);
        let _socket = UnixListener::bind(place("socket")).unwrap();
        symlink(place("missing"), place("dangling")).unwrap();
        for (name, why) in [
            ("socket", "a socket"),
            ("dangling", "does not exist"),
            (".", "a directory"),
        ] {
            let error = lock(&place(name)).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        }
        fs::write(place("file"), "").unwrap();
        symlink(place("file"), place("link")).unwrap();
        for name in ["file", "link"] {
            assert!(lock(&place(name)).unwrap().0.ends_with("file"));
        }
        assert!(lock(&place("new")).is_ok());
    }

    #[test]
    fn replaced_file_follows_no_link_and_leaves_no_other_file() {
        let directory = tempfile::tempdir().unwrap();
        let (path, other) = (directory.path().join("it"), directory.path().join("other"));
        fs::write(&other, "precious").unwrap();
        for link in [directory.path().join("it.new"), path.clone()] {
            symlink(&other, link).unwrap();
        }
        for text in ["one", "two"] {
            replace(&path, text.as_bytes(), 0o600).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        let mode = fs::symlink_metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_to_string(&other).unwrap(), "precious");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
    }
}
