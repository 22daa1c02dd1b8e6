//! Files that a running server reads again when they change.

use std::{fs, path::Path};

use crate::{server::Server, wait::until};

/// Replaces a file atomically, as editors do.
pub fn replace(path: &Path, text: impl AsRef<[u8]>) {
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(new, path).unwrap();
}

impl Server {
    /// Makes the server read its files now, and waits until their values are in force. Without the
    /// signal, it reads a changed file at its next look, which is up to a second later.
    pub fn reload(&self) {
        let signals = || {
            let log = self.stderr();
            log.iter().filter(|it| it.contains("SIGHUP: ")).count()
        };
        // The server logs the second signal after it has handled the first one.
        for _ in 0..2 {
            let before = signals();
            self.signal("HUP");
            until("the server handles SIGHUP", || signals() > before);
        }
    }

    /// Replaces a file that the server reads, and waits until the new values are in force.
    pub fn change_file(&self, path: &Path, text: &str) {
        replace(path, text);
        self.reload();
    }
}
