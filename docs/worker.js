// Search in a folder: browsers refuse workers to pages that are opened from a file, so that the theme asks for one that
// runs in a hidden frame. Its own comes from another server; this one is here.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = (this.inside = frame.contentWindow)
      this.ready = new Promise((resolve) => {
        this.load = (address) =>
          new Promise((loaded, failed) => {
            const script = inside.document.createElement("script")
            script.src = address
            script.onload = loaded
            script.onerror = failed
            inside.document.head.append(script)
          })
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
        inside.importScripts = async (...addresses) => {
          for (const address of addresses) await this.load(address)
        }
        resolve(this.load(url))
      })
    }

    set onmessage(listener) {
      this.addEventListener("message", listener)
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.inside.frameElement.remove()
    }
  }
  window.Worker = window.IFrameWorker
}
