//! Programs for other processors, which qemu runs. The tests and their clients stay native.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use crate::binary;

/// Registers an emulator in a user namespace and runs a program.
const EMULATE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/emulate.sh");

/// The program for one target of `host/dist/build`.
#[derive(Clone, Debug)]
pub struct Processor {
    /// The target, such as `aarch64-unknown-linux-musl`.
    pub target: &'static str,
    program: PathBuf,
    /// How files for the processor begin (in the notation of binfmt_misc), and its emulator. None
    /// if this machine executes the program by itself.
    emulator: Option<(String, PathBuf)>,
}

impl Processor {
    /// Finds the program and its emulator. Returns none and prints the reason if one is missing.
    pub fn find(target: &'static str) -> Option<Processor> {
        let program = match binary::for_target(target) {
            Ok(program) => program,
            Err(reason) => {
                eprintln!("skipped: {reason}");
                return None;
            }
        };
        let mut processor = Processor {
            target,
            program,
            emulator: None,
        };
        if processor.runs() {
            return Some(processor);
        }
        // The class of an ELF file (64 or 32 bits), its machine, and the emulator.
        let (class, machine, name) = match target.split('-').next() {
            Some("aarch64") => (2, 0xb7, "qemu-aarch64"),
            Some("armv7") => (1, 0x28, "qemu-arm"),
            _ => panic!("this machine cannot run its own program for {target}"),
        };
        let paths = [
            format!("/usr/bin/{name}-static"),
            format!("/usr/bin/{name}"),
        ];
        let Some(emulator) = paths.iter().map(Path::new).find(|path| path.exists()) else {
            eprintln!("skipped: {name} is missing: sudo apt-get install qemu-user-static");
            return None;
        };
        let ignored = r"\x00".repeat(9);
        let magic = format!(r"\x7fELF\x0{class}\x01\x01{ignored}\x02\x00\x{machine:02x}\x00");
        processor.emulator = Some((magic, emulator.to_owned()));
        if !processor.runs() {
            eprintln!(
                "skipped: {emulator:?} cannot be registered with binfmt_misc in a user namespace, \
                 which Linux 6.7 and later allow"
            );
            return None;
        }
        Some(processor)
    }

    /// Whether the program prints its version.
    fn runs(&self) -> bool {
        let mut command = self.command();
        let output = command.arg("--version").output();
        output.is_ok_and(|output| {
            let printed = String::from_utf8_lossy(&output.stdout).into_owned();
            output.status.success() && printed.contains(self.target)
        })
    }

    /// The program, without arguments. The process that it starts becomes the program.
    pub fn command(&self) -> Command {
        let Some((magic, emulator)) = &self.emulator else {
            return Command::new(&self.program);
        };
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", EMULATE]);
        command.arg(magic).arg(emulator).arg(&self.program);
        command
    }
}
