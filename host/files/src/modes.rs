//! Warns of files that other accounts of the machine can write or read.
//!
//! They never fail a start: a mount may give its files any mode.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// A warning for the operator if other accounts can write this file. `effect` ends the sentence
/// "other accounts, which could".
#[must_use]
pub fn writable(path: &Path, effect: &str) -> Option<String> {
    warning(path, 0o022, "written", effect, "go-w")
}

/// A warning for the operator if each account can read this file. `effect` ends the sentence "other
/// accounts, which could".
#[must_use]
pub fn readable(path: &Path, effect: &str) -> Option<String> {
    warning(path, 0o004, "read", effect, "o-r")
}

/// A warning if a file, or the file behind a link, has `any` of these permissions. None also if the
/// file cannot be examined: then the error of reading it is enough.
fn warning(path: &Path, any: u32, done: &str, effect: &str, change: &str) -> Option<String> {
    let mode = fs::metadata(path).ok()?.permissions().mode() & 0o777;
    let path = path.display();
    (mode & any != 0).then(|| {
        format!(
            "{path} can be {done} by other accounts (mode {mode:03o}), which could {effect}: run `chmod {change} {path}`"
        )
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn modes_that_include_other_accounts_cause_warnings() {
        let directory = tempfile::tempdir().unwrap();
        let (path, link) = (directory.path().join("it"), directory.path().join("link"));
        fs::write(&path, "").unwrap();
        symlink(&path, &link).unwrap();
        for (mode, can_write, can_read) in [
            (0o600, false, false),
            (0o640, false, false),
            (0o644, false, true),
            (0o660, true, false),
            (0o602, true, false),
            (0o666, true, true),
        ] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            for path in [&path, &link] {
                let (write, read) = (writable(path, "add a"), readable(path, "use b"));
                assert_eq!(write.is_some(), can_write, "{mode:o}");
                assert_eq!(read.is_some(), can_read, "{mode:o}");
            }
        }
        let warning = writable(&path, "add a").unwrap();
        assert!(
            warning.contains("(mode 666), which could add a"),
            "{warning}"
        );
        assert_eq!(writable(&directory.path().join("none"), "add a"), None);
    }
}
