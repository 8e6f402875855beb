//! A real browser: headless Chromium, driven by WebDriver.

use std::{
    env, fs,
    io::{BufRead, BufReader},
    ops::Deref,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

use fantoccini::{
    Client, ClientBuilder, Locator,
    actions::{InputSource, MOUSE_BUTTON_LEFT, MouseActions, PointerAction},
    elements::Element,
    error::CmdError,
};
use hyper_util::client::legacy::connect::HttpConnector;
use serde_json::json;

use super::{eventually, missing};

/// A window with a profile of its own; gone when it is dropped.
pub struct Browser {
    client: Client,
    _driver: Driver,
}

struct Driver {
    child: Child,
    profile: PathBuf,
}

impl Browser {
    /// `None` where Chromium or its driver is not installed and need not be.
    pub async fn start() -> Option<Self> {
        let programs = ["chromium", "chromedriver"].map(program);
        let [Some(chromium), Some(driver)] = programs else {
            missing(if programs[0].is_none() { "chromium" } else { "chromedriver" });
            return None;
        };
        let (driver, port) = Driver::start(&driver);
        let arguments = [
            "--headless=new".to_owned(),
            // It refuses to run as root otherwise, and containers have little shared memory.
            "--no-sandbox".into(),
            "--disable-dev-shm-usage".into(),
            "--disable-crash-reporter".into(),
            "--window-size=640,560".into(),
            format!("--user-data-dir={}", driver.profile.display()),
        ];
        let capabilities = json!({
            // The test waits for what it wants to see, also while a request is under way.
            "pageLoadStrategy": "none",
            "goog:chromeOptions": {"binary": chromium, "args": arguments},
        });
        let client = ClientBuilder::new(HttpConnector::new())
            .capabilities(capabilities.as_object().unwrap().clone())
            .connect(&format!("http://127.0.0.1:{port}"))
            .await
            .unwrap();
        Some(Self { client, _driver: driver })
    }

    /// Until the page says so.
    pub async fn sees(&self, text: &str) {
        eventually(&format!("the page says {text:?}"), || async { self.text().await.contains(text) }).await;
    }

    /// What the page says; nothing while there is none.
    pub async fn text(&self) -> String {
        match self.find(Locator::Css("body")).await {
            Ok(body) => body.text().await.unwrap_or_default(),
            Err(_) => String::new(),
        }
    }

    /// An element of the page that is there now.
    pub async fn element(&self, css: &str) -> Element {
        self.find(Locator::Css(css)).await.unwrap_or_else(|error| panic!("{css}: {error}"))
    }

    /// The value of a field.
    pub async fn value(&self, css: &str) -> String {
        self.element(css).await.prop("value").await.unwrap().unwrap_or_default()
    }

    /// Types over what a field says.
    pub async fn fill_in(&self, css: &str, value: &str) {
        self.at(Locator::Css(css), async |field| {
            field.clear().await?;
            field.send_keys(value).await
        })
        .await;
    }

    /// A link with this text.
    pub async fn follow(&self, text: &str) {
        self.at(Locator::LinkText(text), async |link| link.click().await).await;
    }

    /// With an element once it is there, and again with the one that stands there then, where the page has changed in
    /// between.
    async fn at(&self, place: Locator<'_>, act: impl AsyncFn(Element) -> Result<(), CmdError>) {
        eventually(&format!("{place:?} is there"), async || match self.find(place).await {
            Ok(element) => act(element).await.is_ok(),
            Err(_) => false,
        })
        .await;
    }

    /// Two clicks, as far apart as those of a hand. It is done when the browser is done with them.
    pub async fn double_click(&self, css: &str) {
        let button = self.element(css).await;
        let mut clicks = MouseActions::new("hand".into()).then(PointerAction::MoveToElement {
            element: button,
            duration: None,
            x: 0.0,
            y: 0.0,
        });
        for _ in 0..2 {
            clicks = clicks
                .then(PointerAction::Down { button: MOUSE_BUTTON_LEFT })
                .then(PointerAction::Up { button: MOUSE_BUTTON_LEFT })
                .then(PointerAction::Pause { duration: Duration::from_millis(200) });
        }
        self.perform_actions(clicks).await.unwrap();
    }

    pub async fn click(&self, css: &str) {
        self.at(Locator::Css(css), async |element| element.click().await).await;
    }
}

impl Deref for Browser {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Driver {
    fn start(program: &Path) -> (Self, u16) {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let profile =
            env::temp_dir().join(format!("it-browser-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
        let _ = fs::remove_dir_all(&profile);
        fs::create_dir(&profile).unwrap();
        let mut child = Command::new(program)
            .arg("--port=0")
            // Whatever Chromium writes beside its profile.
            .envs([("HOME", &profile), ("TMPDIR", &profile)])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // Its browser is in it, too.
            .process_group(0)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let started = "was started successfully on port ";
        let port = lines.find_map(|line| line.rsplit_once(started)?.1.trim_end_matches('.').parse().ok());
        let port = port.expect("the driver should tell its port");
        thread::spawn(move || lines.for_each(drop));
        (Self { child, profile }, port)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-KILL", "--", &format!("-{}", self.child.id())]).status();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.profile);
    }
}

fn program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).map(|directory| directory.join(name)).find(|program| program.is_file())
}
