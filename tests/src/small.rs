//! Small file systems, to fill them. They need root.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use tempfile::TempDir;

use crate::Server;

/// Ends all writes to an ext4 file system, as `godown` of xfstests does: EXT4_IOC_SHUTDOWN with
/// EXT4_GOING_FLAGS_NOLOGFLUSH. The package perl-base is on every Debian.
const SHUTDOWN: &str = r#"
    open(my $directory, "<", $ARGV[0]) or die $!;
    my $flag = pack("L", 2);
    ioctl($directory, 0x8004587d, $flag) or die $!;
"#;

#[derive(Clone, Copy, Debug)]
pub enum FileSystem {
    /// In memory.
    Tmpfs,
    /// On a loop device. Unlike tmpfs it has a journal, and needs blocks for its own tables.
    Ext4,
}

/// A small file system, which is unmounted when this is dropped.
pub struct Small {
    path: PathBuf,
    kind: FileSystem,
    directory: TempDir,
}

impl Small {
    /// Returns none and prints the reason if this user may not mount a file system.
    pub fn mount(kind: FileSystem, megabytes: u32) -> Option<Small> {
        Small::mount_formatted(kind, megabytes, &[])
    }

    /// An ext4 file system with blocks of 4 KiB, which mkfs chooses only for larger ones, and
    /// without the tables that the kernel would otherwise fill after the mount.
    pub fn mount_to_measure(megabytes: u32) -> Option<Small> {
        let format = ["-b", "4096", "-E", "lazy_itable_init=0,lazy_journal_init=0"];
        Small::mount_formatted(FileSystem::Ext4, megabytes, &format)
    }

    fn mount_formatted(kind: FileSystem, megabytes: u32, format: &[&str]) -> Option<Small> {
        let directory = tempfile::tempdir().unwrap();
        let small = Small {
            path: directory.path().join("small"),
            kind,
            directory,
        };
        fs::create_dir(&small.path).unwrap();
        let path = small.path.to_str().unwrap();
        let (image, size) = (small.image(), format!("size={megabytes}m"));
        let mounted = match kind {
            FileSystem::Tmpfs => tool("mount", &["-t", "tmpfs", "-o", &size, "none", path]),
            FileSystem::Ext4 => {
                small.resize_image(megabytes);
                // Root, as which this test runs, could use the blocks that are reserved for it.
                let arguments = [&["-q", "-m", "0"], format, &[&image]].concat();
                tool("mkfs.ext4", &arguments)
                    .and_then(|_| tool("mount", &["-o", "loop", &image, path]))
            }
        };
        if let Err(reason) = &mounted {
            eprintln!("skipped: {kind:?} cannot be mounted here: {reason}");
        }
        mounted.is_ok().then_some(small)
    }

    pub fn remount(&self, option: &str) {
        let path = self.path.to_str().unwrap();
        tool("mount", &["-o", &format!("remount,{option}"), path]).unwrap();
    }

    /// Makes the file system larger. Ext4 is unmounted meanwhile, since the kernel may forbid to
    /// resize it while it is mounted.
    pub fn resize(&self, megabytes: u32, server: &mut Server) {
        let path = self.path.to_str().unwrap();
        match self.kind {
            FileSystem::Tmpfs => {
                let options = format!("remount,size={megabytes}m");
                tool("mount", &["-o", &options, path]).unwrap();
            }
            FileSystem::Ext4 => {
                let image = self.image();
                server.kill();
                tool("umount", &[path]).unwrap();
                self.resize_image(megabytes);
                tool("e2fsck", &["-f", "-p", &image]).unwrap();
                tool("resize2fs", &[&image]).unwrap();
                tool("mount", &["-o", "loop", &image, path]).unwrap();
                server.restart();
            }
        }
    }

    /// The machine of an ext4 file system loses its power: nothing more reaches the disk, and what
    /// was not flushed is lost. All processes that use the file system must be killed then.
    pub fn lose_power(&self) {
        tool("perl", &["-e", SHUTDOWN, self.path.to_str().unwrap()]).unwrap();
    }

    /// Mounts the file system again after [`Self::lose_power`].
    pub fn restore_power(&self) {
        let path = self.path.to_str().unwrap();
        tool("umount", &[path]).unwrap();
        tool("mount", &["-o", "loop", &self.image(), path]).unwrap();
    }

    /// The directory at which it is mounted.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The room for files. On ext4, tables and the journal take a part of the disk.
    pub fn free_bytes(&self) -> usize {
        let path = self.path.to_str().unwrap();
        let printed = tool("df", &["--block-size=1", "--output=avail", path]).unwrap();
        printed.lines().last().unwrap().trim().parse().unwrap()
    }

    /// The bytes written so far to the loop device of an ext4 file system, by files and by the file
    /// system itself.
    pub fn device_bytes(&self) -> u64 {
        let found = tool(
            "losetup",
            &["--noheadings", "--output=NAME", "-j", &self.image()],
        );
        let device = found.unwrap();
        let name = device.trim().strip_prefix("/dev/").unwrap();
        let stat = fs::read_to_string(format!("/sys/block/{name}/stat")).unwrap();
        // Documentation/block/stat.rst: the seventh field counts written sectors of 512 bytes.
        let sectors: u64 = stat.split_whitespace().nth(6).unwrap().parse().unwrap();
        512 * sectors
    }

    /// Returns once everything that was written so far is on the device.
    pub fn settle(&self) {
        let path = self.path.to_str().unwrap();
        tool("sync", &["--file-system", path]).unwrap();
    }

    /// The file of the loop device.
    fn image(&self) -> String {
        let image = self.directory.path().join("image");
        image.into_os_string().into_string().unwrap()
    }

    fn resize_image(&self, megabytes: u32) {
        let options = File::options().create(true).append(true).open(self.image());
        options
            .unwrap()
            .set_len(u64::from(megabytes) << 20)
            .unwrap();
    }

    /// The path of a data directory on it.
    pub fn data(&self) -> String {
        self.path
            .join("data")
            .into_os_string()
            .into_string()
            .unwrap()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        // Lazily, since the server of a failed test may still run.
        let _ = Command::new("umount").arg("-l").arg(&self.path).output();
    }
}

/// Runs a system tool. Returns its output, or the reason for its failure.
fn tool(name: &str, arguments: &[&str]) -> Result<String, String> {
    match Command::new(name).args(arguments).output() {
        Ok(output) if output.status.success() => Ok(String::from_utf8(output.stdout).unwrap()),
        other => Err(format!("{name}: {other:?}")),
    }
}
