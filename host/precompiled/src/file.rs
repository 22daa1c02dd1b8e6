//! Reads the file of a policy from any path.
//!
//! Must never read more than a limit and one byte: the path may name a device or a pipe without end.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Reads a file of at most `max` bytes. Fails if the file cannot be read, or is larger.
pub fn read_file(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let mut length = file.metadata()?.len();
    let mut bytes = Vec::new();
    if length <= max {
        // The file may grow while it is read, or be a pipe.
        file.take(max + 1).read_to_end(&mut bytes)?;
        length = bytes.len() as u64;
    }
    if length > max {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it has {length} bytes, and a policy at most {max}"),
        ));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endless_and_too_large_files_are_refused() {
        let max = 5_000;
        let error = read_file(Path::new("/dev/zero"), max).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("large");
        let file = File::create(&path).unwrap();
        file.set_len(max + 1).unwrap();
        let says = read_file(&path, max).unwrap_err().to_string();
        assert_eq!(says, "it has 5001 bytes, and a policy at most 5000");
        file.set_len(max).unwrap();
        assert_eq!(read_file(&path, max).unwrap().len() as u64, max);
    }
}
